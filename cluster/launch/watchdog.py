"""A launcher's end of its witness: a process in a session of its own that outlives it and ends what it leaves."""

import subprocess
import sys

from cluster.packages import ROOT

ALL_WELL = b"ended\n"
"""The last word of a launcher that has ended its run itself."""


class Watchdog:
    """The launcher's end of it."""

    def __init__(self, what: str, *arguments: str) -> None:
        """Start it. Call before the run's directory enters this process's environment."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.launch.witness", what, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self, seconds: float = 5.0) -> None:
        """All is well: let it go."""
        try:
            self._process.communicate(ALL_WELL, timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
