"""What SIGINT and SIGTERM mean to a launcher: at first a request, the second time an order."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

FORCED_EXIT = 130


class Stopped(BaseException):
    """A signal came while there was nothing yet that would have to be stopped in order."""


class StopSignals:
    """Notes the first signal, and on the second one ends everything at once by `force`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._force: Callable[[], object] | None = None

    def install(self, force: Callable[[], object] | None = None) -> None:
        """Handle both signals from now on. Without `force` there is nothing to stop: the first one raises Stopped.

        Ray puts a handler of its own in place when it starts, so call this again after it.
        """
        self._force = force
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def note(self) -> None:
        """A stop has been asked for in another way."""
        self._event.set()

    def __bool__(self) -> bool:
        """Whether a stop has been asked for."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for a stop; True when it has been asked for."""
        return self._event.wait(seconds)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self._event.is_set()
        self._event.set()
        if self._force is None:
            raise Stopped
        if again:
            self._force()
            os._exit(FORCED_EXIT)
