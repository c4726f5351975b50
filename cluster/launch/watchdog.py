"""The witness of a launcher: a process in a session of its own, with a pipe as input.

    python -m cluster.launch.watchdog processes DIRECTORY            the run has a Ray of its own
    python -m cluster.launch.watchdog application ADDRESS [serve]    an application on a cluster, and Serve perhaps

The launcher never closes its end of the pipe while it lives. If the pipe ends without the word that all is well, the
launcher was killed, and this process takes away what the run has left.
"""

import signal
import subprocess
import sys
from pathlib import Path

from cluster.launch import processes
from cluster.packages import ROOT

ALL_WELL = b"ended\n"
END_SECONDS = 10.0


def main(what: str, where: str, *options: str) -> int:
    """Wait for the launcher's end. Returns 0 if nothing is left then."""
    # A signal that a service manager sends to a whole group is the launcher's business.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == ALL_WELL:
        return 0
    if what == "processes":
        return 1 if processes.end(Path(where), END_SECONDS) else 0
    from cluster.launch.cluster_ray import remove_application  # imports Ray, which is rarely needed

    return 0 if remove_application(where, with_serve="serve" in options) else 1


class Watchdog:
    """The launcher's end of it."""

    def __init__(self, what: str, *arguments: str) -> None:
        """Start it. Call before the run's directory enters this process's environment."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.launch.watchdog", what, *arguments],
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
