"""The witness of a launcher: a process in a session of its own, with a pipe as input.

    python -m cluster.launch.witness processes DIRECTORY            the run has a Ray of its own
    python -m cluster.launch.witness application ADDRESS [serve]    an application on a cluster, and Serve perhaps

The launcher never closes its end of the pipe while it lives. If the pipe ends without the word that all is well, the
launcher was killed, and this process takes away what the run has left.
"""

import signal
import sys
from pathlib import Path

from cluster.launch import processes
from cluster.launch.watchdog import ALL_WELL

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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
