"""Faults for a service that runs on this machine: as a command against any of ours, or for a benchmark's own.

python -m benchmarks faults kill-worker                      # once, now
python -m benchmarks faults stop-worker --count 5 --every 20 --seed 3

| fault          | what happens                                                                       |
|----------------|------------------------------------------------------------------------------------|
| kill-worker    | SIGKILL to a rank                                                                  |
| stop-worker    | SIGSTOP to a rank: it holds its sockets and says nothing                           |
| slow-worker    | a rank runs a tenth of the time, for five seconds                                  |
| starve-worker  | a rank gets no more memory from the system                                         |
| kill-engine    | SIGKILL to an engine                                                               |
| stop-engine    | SIGSTOP to an engine                                                               |
| pause-engine   | SIGSTOP to an engine, and SIGCONT nine seconds later                               |
| pause-frontend | SIGSTOP to a front end, and SIGCONT ten seconds later                              |
| kill-node      | SIGKILL to a raylet that is not the head's, and to all that it started             |
| cut-link       | every link on which steps are executed is shut down (needs the right to trace)     |
| garbage        | random bytes to every port that an engine or a front end listens on                |
| full-disk      | files of the service's Python processes cannot grow: its logs                      |
| redeploy       | the application is deployed again, with another token budget: its engines are new  |

Which process is hit, and garbage's bytes, come from the seed. Knows nothing of what should happen then.
"""

import argparse
import ctypes
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.counts import positive
from benchmarks.service_processes import ENGINE, FRONTEND, FaultError, ServiceProcesses

SLOW_SECONDS = 5.0
ENGINE_PAUSE_SECONDS = 9.0
"""Long enough for front ends to give its streams to another engine, and too short for Serve to replace it."""
FRONTEND_PAUSE_SECONDS = 10.0
DEPLOY_SECONDS = 240.0
_PIDFD_GETFD = 438  # Linux 5.6, all architectures


@contextmanager
def _borrowed(pid: int, descriptor: int) -> Iterator[socket.socket]:
    """A socket of another process. Raises FaultError where the system does not lend it."""
    process = os.pidfd_open(pid)
    try:
        lent = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
        if lent < 0:
            raise FaultError(f"no socket of process {pid} can be had: {os.strerror(ctypes.get_errno())}")
        with socket.socket(fileno=lent) as borrowed:
            yield borrowed
    finally:
        os.close(process)


# The faults: each says what it did


def kill_worker(processes: ServiceProcesses, rng: random.Random) -> str:
    return _kill(rng.choice(processes.ranks()), "rank")


def stop_worker(processes: ServiceProcesses, rng: random.Random) -> str:
    return _suspend(rng.choice(processes.ranks()), "rank")


def kill_engine(processes: ServiceProcesses, rng: random.Random) -> str:
    return _kill(rng.choice(processes.named(ENGINE)), "engine")


def stop_engine(processes: ServiceProcesses, rng: random.Random) -> str:
    return _suspend(rng.choice(processes.named(ENGINE)), "engine")


def pause_engine(processes: ServiceProcesses, rng: random.Random) -> str:
    """Blocks while it lasts."""
    return _pause(rng.choice(processes.named(ENGINE)), "engine", ENGINE_PAUSE_SECONDS)


def pause_frontend(processes: ServiceProcesses, rng: random.Random) -> str:
    """Blocks while it lasts."""
    return _pause(rng.choice(processes.named(FRONTEND)), "front end", FRONTEND_PAUSE_SECONDS)


def slow_worker(processes: ServiceProcesses, rng: random.Random) -> str:
    """Blocks while it lasts."""
    victim = rng.choice(processes.ranks())
    deadline = time.monotonic() + SLOW_SECONDS
    with suppress(psutil.NoSuchProcess):  # It may be replaced meanwhile.
        while time.monotonic() < deadline:
            victim.suspend()
            time.sleep(0.09)
            victim.resume()
            time.sleep(0.01)
    return f"rank {victim.pid} ran a tenth of the time for {SLOW_SECONDS:g} s"


def starve_worker(processes: ServiceProcesses, rng: random.Random) -> str:
    victim = rng.choice(processes.ranks())
    in_use = victim.memory_info().vms
    resource.prlimit(victim.pid, resource.RLIMIT_AS, (in_use, in_use))
    return f"rank {victim.pid} stays at {in_use >> 20} MiB of addresses"


def kill_node(processes: ServiceProcesses, rng: random.Random) -> str:
    raylet = rng.choice(processes.far_raylets())
    victims = [raylet, *raylet.children(recursive=True)]
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    return f"killed the node of raylet {raylet.pid}, {len(victims)} processes"


def cut_link(processes: ServiceProcesses, rng: random.Random) -> str:
    links = set(processes.step_links())
    for rank in processes.ranks():
        for connection in rank.net_connections("tcp"):
            if connection.raddr and (tuple(connection.laddr), tuple(connection.raddr)) in links:
                with _borrowed(rank.pid, connection.fd) as link:
                    link.shutdown(socket.SHUT_RDWR)
    return f"cut {len(links)} links"


def garbage(processes: ServiceProcesses, rng: random.Random) -> str:
    listeners = {
        each.laddr
        for process in (*processes.named(ENGINE), *processes.named(FRONTEND))
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    for host, port in listeners:
        with suppress(OSError), socket.create_connection((host, port), 2.0) as victim:
            victim.sendall(rng.randbytes(rng.randint(1, 4096)))
    return f"sent random bytes to {len(listeners)} ports"


def full_disk(processes: ServiceProcesses, rng: random.Random) -> str:
    victims = processes.python()
    for victim in victims:
        with suppress(ProcessLookupError):
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, 0))
    return f"files of {len(victims)} processes cannot grow"


def redeploy(processes: ServiceProcesses, rng: random.Random) -> str:
    """Returns when the new engines serve. Raises FaultError with the end of what the deployment said."""
    raylet, word = processes.head_raylet(), f"scheduler.max_num_batched_tokens={rng.randrange(200, 500)}"
    (address,) = (each.partition("=")[2] for each in raylet.cmdline() if each.startswith("--gcs-address="))
    began = time.monotonic()
    try:
        deployed = subprocess.run(
            [sys.executable, "-m", "benchmarks.redeploy", str(processes.launcher().pid), address, word],
            env=raylet.environ(), cwd=Path(__file__).resolve().parent.parent, timeout=DEPLOY_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise FaultError(f"the application was not deployed again within {DEPLOY_SECONDS:g} s") from None
    if deployed.returncode:
        raise FaultError(f"the application was not deployed again: {deployed.stdout[-800:]}")
    return f"deployed with {word} in {time.monotonic() - began:.1f} s"


Fault = Callable[[ServiceProcesses, random.Random], str]
FAULTS: dict[str, Fault] = {
    function.__name__.replace("_", "-"): function
    for function in (
        kill_worker, stop_worker, slow_worker, starve_worker, kill_engine, stop_engine, pause_engine, pause_frontend,
        kill_node, cut_link, garbage, full_disk, redeploy,
    )
}  # fmt: skip


def _kill(victim: psutil.Process, what: str) -> str:
    victim.kill()
    return f"killed {what} {victim.pid}"


def _suspend(victim: psutil.Process, what: str) -> str:
    victim.suspend()
    return f"stopped {what} {victim.pid}"


def _pause(victim: psutil.Process, what: str, seconds: float) -> str:
    """Raises FaultError when it is killed meanwhile."""
    victim.suspend()
    try:
        time.sleep(seconds)
    finally:
        with suppress(psutil.NoSuchProcess):
            victim.resume()
    if not victim.is_running():
        raise FaultError(f"{what} {victim.pid} did not live through a pause of {seconds:g} s")
    return f"{what} {victim.pid} was stopped for {seconds:g} s"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("fault", choices=sorted(FAULTS))
    parser.add_argument("--count", type=positive, default=1)
    parser.add_argument("--every", type=float, default=10.0, help="mean seconds between two; the moments are random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=int, help="process id of the launcher; default: any service on this machine")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 when the fault cannot be made."""
    args = _parse(argv)
    rng = random.Random(args.seed)
    for index in range(args.count):
        if index:
            time.sleep(rng.uniform(0.5, 1.5) * args.every)
        try:
            print(FAULTS[args.fault](ServiceProcesses(args.root), rng), flush=True)
        except (FaultError, psutil.Error, PermissionError) as error:
            print(f"faults: {args.fault}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
