"""The service that a batch starts for itself: `chunkserve serve` in a process of its own, ended with the batch."""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from cluster.errors import EngineError
from cluster.launch.local_ray import free_ports

_START_SECONDS = 3600.0
"""A cluster may have to start a node, and a node to fetch a large model."""
_STOP_SECONDS = 120.0
_POLL_SECONDS = 0.5
_ASK_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 4000


@contextmanager
def own_service(words: Sequence[str], address: str | None, log: Path) -> Iterator[str]:
    """Yields its base URL once it serves; what it says goes to `log`. `words` are options and settings of `serve`.

    It ends with this process, however this one ends. Raises EngineError with the end of its log if it does not start.
    """
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "cluster", "serve", *words, "server.host=127.0.0.1", f"server.port={port}"]
    command += ["--address", address] if address else []
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec there may be no locks

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("wb") as file:
        # A session of its own: Ctrl-C in a terminal is the batch's, which ends this after its requests.
        process = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, preexec_fn=end_with_parent
        )
    try:
        base_url = f"http://127.0.0.1:{port}"
        _wait_ready(process, base_url, log)
        yield base_url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its watchdog ends the rest
            process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", base_url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _is_ready(base_url):
        if process.poll() is not None:
            raise EngineError(f"the batch's own service did not start:\n{_tail(log)}{_hint(log)}")
        if time.monotonic() > deadline:
            raise EngineError(f"the batch's own service was not ready within {_START_SECONDS:g} s:\n{_tail(log)}")
        time.sleep(_POLL_SECONDS)


def _is_ready(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/health", timeout=_ASK_SECONDS, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _tail(log: Path) -> str:
    return log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()


def _hint(log: Path) -> str:
    return "\nto use the service that runs there, give its address with --url" if "already" in _tail(log) else ""
