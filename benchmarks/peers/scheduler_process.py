"""vLLM's scheduler in a process of its own, in its own environment, asked for one measurement at a time."""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks.peers.environment import PeerError
from benchmarks.peers.vllm import Vllm

SECONDS = 600.0
"""Longest life of the process."""
_SCRIPT = Path(__file__).with_name("vllm_scheduler.py")


class VllmScheduler:
    """Idle between measurements, so that ours can be timed in turn with it."""

    def __init__(self, requests: IO[str], answers: IO[str], log: Path) -> None:
        self._requests, self._answers, self._log = requests, answers, log

    def measure(self, num_decodes: int, num_steps: int, prompt_tokens: int) -> tuple[float, float, float]:
        """Median milliseconds of schedule(), of update_from_output(), and of both. Raises PeerError."""
        question = {"num_decodes": num_decodes, "num_steps": num_steps, "prompt_tokens": prompt_tokens}
        with suppress(BrokenPipeError):  # it is gone: reading says so
            self._requests.write(json.dumps(question) + "\n")
            self._requests.flush()
        for line in self._answers:
            if line.startswith('{"schedule_ms"'):  # anything else is its log
                answer = json.loads(line)
                return answer["schedule_ms"], answer["update_ms"], answer["total_ms"]
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise PeerError(f"vLLM's scheduler ended or took more than {SECONDS:.0f} s\n{tail}")


@contextmanager
def running_vllm_scheduler(model: Path) -> Iterator[VllmScheduler]:
    """Install the peer if need be, and start the process. Raises PeerError."""
    peer = Vllm()
    peer.prepare()
    # -P: the folder of the script holds a vllm.py, ours, which would come before the package.
    command = [str(peer.environment.python), "-P", str(_SCRIPT), str(model)]
    with tempfile.NamedTemporaryFile(prefix="chunkserve-", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **peer.variables()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(SECONDS, _kill, [process.pid])
        deadline.start()
        try:
            yield VllmScheduler(process.stdin, process.stdout, Path(log.name))
        finally:
            deadline.cancel()
            _kill(process.pid)
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
