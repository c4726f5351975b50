"""What SIGINT and SIGTERM mean to a launcher: at first a request, the second time an order."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

FORCED_EXIT = 130
_ECHO_SECONDS = 0.5
"""A signal so soon after the first is the first again: told to the process and its group, or passed on by a parent."""


class Stopped(BaseException):
    """A signal came while there was nothing yet that would have to be stopped in order."""


class StopSignals:
    """Notes the first signal, and on the second one ends everything at once by `force`.

    A handler may interrupt another: so there are no locks here, as in `threading.Event`, only a time and a pipe.
    Python writes to the pipe the moment a signal arrives, before it gets to the handler: a signal that comes just
    before `wait` blocks wakes it all the same.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._force: Callable[[], object] | None = None

    def install(self, force: Callable[[], object] | None = None) -> None:
        """Handle both signals from now on. Without `force` there is nothing to stop: the first one raises Stopped.

        Ray puts a handler of its own in place when it starts, so call this again after it.
        """
        self._force = force
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def note(self) -> None:
        """A stop has been asked for in another way."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        with contextlib.suppress(BlockingIOError):  # full: whoever waits is woken anyway
            os.write(self._writer, b"!")

    def __bool__(self) -> bool:
        """Whether a stop has been asked for."""
        return self._asked_at is not None

    def wait(self, seconds: float) -> bool:
        """Wait for a stop; True when it has been asked for."""
        if not self:
            select.select([self._reader], [], [], seconds)
        return bool(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        asked_at = self._asked_at
        self.note()
        if self._force is None:
            raise Stopped
        if asked_at is not None and time.monotonic() - asked_at > _ECHO_SECONDS:
            self._force()
            os._exit(FORCED_EXIT)
