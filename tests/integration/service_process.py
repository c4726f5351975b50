"""`chunkserve serve` as a user starts it: a process of its own, watched through what it prints."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from cluster.launch.local_ray import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 180.0
STOP_SECONDS = 60.0


class ServiceProcess:
    """One service. It leads a process group of its own, as a command typed into a shell does."""

    def __init__(self, model: Path, *words: str) -> None:
        self.port = free_ports(1)[0]
        command = [sys.executable, "-m", "cluster", "serve", f"model.path={model}", f"server.port={self.port}", *words]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run_directory(self) -> Path:
        """Where the service said that it keeps its logs: the mark of its processes."""
        line = self.wait_line(r"starting Ray")
        return Path(line.rsplit(" ", 1)[-1])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_line(self, pattern: str, seconds: float = START_SECONDS) -> str:
        """The first line that matches, or an assertion that shows all lines."""
        deadline = time.monotonic() + seconds
        while True:
            ended = not self._reader.is_alive()
            for line in list(self.lines):
                if re.search(pattern, line):
                    return line
            assert not ended, f"the service ended without saying {pattern!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"{pattern!r} was not said within {seconds:g} s:\n{self.output}"
            time.sleep(0.05)

    def wait_ready(self) -> None:
        self.wait_line(r"ready at ")

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the launcher alone, and return its exit status."""
        self.process.send_signal(number)
        return self.wait()

    def signal_group(self, number: int) -> None:
        """What a terminal does at Ctrl-C, and some service managers at a stop: the whole group gets the signal."""
        os.killpg(self.process.pid, number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status

    def kill(self) -> None:
        """For teardowns: whatever state it is in, the launcher's end lets the watchdog end the rest."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)


def living_processes(run_directory: Path) -> list[str]:
    """Everything that names the run's directory in its arguments, environment or open files, zombies left out.

    Broader than the launcher's own search on purpose: it must find what that would miss.
    """
    found = []
    marker = str(run_directory)
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = [*process.cmdline(), *process.environ().values(), *_open_files(process.pid)]
            if any(marker in word for word in words):
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _open_files(pid: int) -> list[str]:
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(str(link.readlink()))
        except OSError:
            continue
    return names


def wait_gone(run_directory: Path, seconds: float) -> None:
    """Assert that nothing of the run lives after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while left := living_processes(run_directory):
        assert time.monotonic() < deadline, f"after {seconds:g} s there still are:\n" + "\n".join(left)
        time.sleep(0.1)
