"""The launcher's parts that need no Ray: signals, placement, failure texts, its processes and its watchdog."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.errors import ConfigError, EngineError
from cluster.launch import processes
from cluster.launch.cluster_ray import check_address
from cluster.launch.deploy_failure import cause_of
from cluster.launch.launcher import check_port
from cluster.launch.local_ray import free_ports, serve_environment, within
from cluster.launch.placement import cpus_needed
from cluster.launch.proxy import RULES, write_proxy_starter
from cluster.launch.signals import Stopped, StopSignals
from cluster.launch.watchdog import Watchdog
from cluster.settings.source import resolve
from cluster.settings.tree import Device, Settings, engine_settings

DEADLINE = 30.0


def settings(*words: str) -> Settings:
    return resolve(Device(), None, words).settings


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield StopSignals()
    for number, handler in before.items():
        signal.signal(number, handler)


def start_sleeper(environment: dict[str, str], code: str = "") -> subprocess.Popen[bytes]:
    """A process that says when it runs and then sleeps."""
    text = f"{code}\nimport time\nprint('up', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, env={**os.environ, **environment})
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def is_alive(pid: int) -> bool:
    """A zombie is dead: it only waits for whoever inherited it to notice."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_first_signal_is_noted(signals: StopSignals) -> None:
    forced: list[int] = []
    signals.install(force=lambda: forced.append(1))
    assert not signals
    signal.raise_signal(signal.SIGTERM)
    assert signals
    assert signals.wait(0)
    assert forced == []


def test_a_signal_with_nothing_to_stop_ends_at_once(signals: StopSignals) -> None:
    signals.install()
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGINT)


def test_the_second_signal_forces() -> None:
    code = (
        "import signal, time\nfrom cluster.launch.signals import StopSignals\n"
        "stop = StopSignals()\nstop.install(force=lambda: print('forced', flush=True))\n"
        "signal.raise_signal(signal.SIGINT)\ntime.sleep(1)\nsignal.raise_signal(signal.SIGINT)\nprint('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.returncode) == ("forced\n", 130)


def test_signals_that_come_together_are_one_and_block_nobody() -> None:
    code = (
        "import os, signal\nfrom cluster.launch.signals import StopSignals\n"
        "stop = StopSignals()\nstop.install(force=lambda: print('forced', flush=True))\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    for turn in range(200):\n"
        "        os.kill(parent, signal.SIGINT); os.kill(parent, signal.SIGTERM)\n"
        "    os._exit(0)\n"
        "while not stop.wait(60): pass\n"
        "os.wait()\nprint('asked', stop.wait(60))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.stdout, done.returncode) == ("asked True\n", 0)


def test_cpus_of_the_whole_application() -> None:
    for replicas in ("parallel.num_replicas=3", "autoscaling.max_replicas=3"):
        tree = settings("server.num_frontends=2", replicas, "parallel.tensor_parallel_size=2")
        assert cpus_needed(tree, engine_settings(tree, "/m", Device())) == 2 + 3 * (1 + 2)


def test_the_cause_of_a_failed_deployment() -> None:
    text = (
        "Deploying application chunkserve failed: engine failed to start 1 times in a row. Error:\n"
        "  File engine.py\n"
        "cluster.errors.ExecutorError: rank 0 failed to load: no weights\n"
        "\nDuring handling of the above exception\n  RuntimeError: x\n"
    )
    assert cause_of(text) == "rank 0 failed to load: no weights"
    assert cause_of("one\n two \n") == "two"
    assert cause_of("") == "Serve gave no cause"


def test_the_environment_of_serve_stays_in_the_runs_directory() -> None:
    directory = Path("/tmp/chunkserve-abcdefgh")
    values = serve_environment(directory, directory / "haproxy")
    paths = [value for name, value in values.items() if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE"))]
    assert len(paths) == 6
    assert all(Path(path).is_relative_to(directory) for path in paths)
    # HAProxy refuses socket paths of more than 97 characters, and Serve puts a node's id of 56 into each.
    assert max(len(str(Path(path).parent / ("0" * 56) / Path(path).name)) for path in paths if ".sock" in path) <= 97
    ports = [value for name, value in values.items() if name.endswith("_PORT")]
    assert len(set(ports)) == 4
    assert values["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert serve_environment(directory, None)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_the_proxys_starter_adds_its_rules_once_and_passes_its_arguments_on(tmp_path: Path) -> None:
    starter = write_proxy_starter(tmp_path, "/bin/echo")
    configuration = tmp_path / "a b.cfg"
    configuration.write_text("frontend prometheus\n    bind :1\nfrontend http_frontend\n    bind :2\n")
    for _ in range(2):
        done = subprocess.run(
            [starter, "-f", configuration, "-sf", "7"], capture_output=True, text=True, timeout=DEADLINE
        )
        assert (done.stdout, done.stderr) == (f"-dS -f {configuration} -sf 7\n", "")
        assert configuration.read_text() == (
            f"frontend prometheus\n    bind :1\nfrontend http_frontend\n{RULES}    bind :2\n"
        )


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.host 'no\.such\.host\.invalid'"):
        check_port("no.such.host.invalid", 8000)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:"):
        check_port("203.0.113.1", free_ports(1)[0])


def test_within_leaves_a_hanging_action_behind() -> None:
    assert within(DEADLINE, lambda: None)
    assert not within(0.05, lambda: time.sleep(1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_within_is_not_done_when_the_action_raises() -> None:
    assert not within(DEADLINE, lambda: check_port("no.such.host.invalid", 8000))


def test_processes_are_found_by_environment_by_descent_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    inherits = start_sleeper({"MARK": str(run / "file")})
    spawn = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env={})"
    parent = start_sleeper({"MARK": str(run)}, spawn)
    stranger = start_sleeper({"MARK": str(tmp_path / "other")})
    try:
        found = {process.pid for process in processes.find(run)}
        assert {inherits.pid, parent.pid} < found
        assert len(found) == 3
        assert stranger.pid not in found
        assert processes.find(run, exclude=found) == []
        assert processes.end(run, DEADLINE) == []
        assert not any(is_alive(pid) for pid in found)
        assert stranger.poll() is None
    finally:
        for process in (inherits, parent, stranger):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize("dismissed", [True, False])
def test_the_watchdog_ends_the_run_only_if_its_launcher_was_killed(tmp_path: Path, dismissed: bool) -> None:
    run = tmp_path / "run"
    worker = start_sleeper({"MARK": str(run)})
    watchdog = Watchdog("processes", str(run))
    try:
        if dismissed:
            watchdog.dismiss()
            assert worker.poll() is None
        else:
            watchdog._process.stdin.close()  # type: ignore[union-attr]  # as the kernel does for a killed launcher
            assert worker.wait(DEADLINE) == -signal.SIGKILL
            assert watchdog._process.wait(DEADLINE) == 0
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()


def test_an_address_where_nothing_listens_is_refused_before_ray_tries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        check_address(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "127.0.0.1:70000", "no.such.host.invalid:6379"):
        with pytest.raises(EngineError, match=address):
            check_address(address)
    for address in ("auto", "ray://127.0.0.1:1", "somewhere"):
        check_address(address)
