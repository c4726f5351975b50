"""A server, ours or another, for the time of a benchmark."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.errors import BenchmarkError

START_SECONDS = 600.0
STOP_SECONDS = 90.0
_ROOT = Path(__file__).resolve().parent.parent


class ServiceError(BenchmarkError):
    """The service did not start or stop; the message holds the end of its log."""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running_service(
    settings: Sequence[str],
    start_seconds: float = START_SECONDS,
    address: str | None = None,
    module: str = "cluster",
) -> Iterator[str]:
    """Start `chunkserve serve` with these `key=value` settings; yields its base URL once it is healthy.

    With an `address` on the Ray cluster there, else on one of its own. `module` is what Python runs as the command.

    Raises ServiceError when it is not healthy in time, ends early, or does not end on SIGTERM.
    """
    port = free_port()
    command = [sys.executable, "-m", module, "serve", f"server.port={port}", *settings]
    command += [] if address is None else ["--address", address]
    with running_server(command, f"http://127.0.0.1:{port}", start_seconds=start_seconds) as base_url:
        yield base_url


@contextmanager
def running_server(
    command: Sequence[str],
    base_url: str,
    title: str = "the service",
    variables: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[str]:
    """Run `command`, which is to serve at `base_url`, in a session of its own; yields the URL once it is healthy.

    `variables` are all its environment variables, by default ours. Ends it with SIGTERM, and whatever is left of
    its process group then with SIGKILL. Raises ServiceError when it is not healthy in time, ends early, or does
    not end on SIGTERM.
    """
    with tempfile.NamedTemporaryFile(prefix="chunkserve-", suffix=".log") as log:
        process = subprocess.Popen(command, cwd=_ROOT, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_healthy(process, base_url, title, Path(log.name), start_seconds)
            yield base_url
        finally:
            _stop(process, title, Path(log.name))


def _wait_healthy(process: "subprocess.Popen[bytes]", base_url: str, title: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_healthy(base_url):
        if process.poll() is not None:
            raise ServiceError(f"{title} ended with code {process.returncode} while starting\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{title} was not healthy within {seconds:g} s\n{_tail(log)}")
        time.sleep(0.2)


def is_healthy(base_url: str) -> bool:
    """Whether GET /health answers 200."""
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: "subprocess.Popen[bytes]", title: str, log: Path) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        raise ServiceError(f"{title} did not end within {STOP_SECONDS:g} s of SIGTERM\n{_tail(log)}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path, num_lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
