"""Compiles the CPU's kernels while Ray starts, so that workers only load them."""

import threading
import time
from collections.abc import Callable

from workers.kernels.build import BuildError, ensure_built


class KernelBuild:
    """One build on a thread of its own. Each compiler call in it has a deadline; a failed build is no failed start."""

    def __init__(self) -> None:
        self._outcome = ""
        self._thread = threading.Thread(target=self._build, name="kernels", daemon=True)
        self._thread.start()

    def wait(self, say: Callable[[str], None]) -> None:
        """Until it has ended; how it went."""
        self._thread.join()
        say(self._outcome)

    def _build(self) -> None:
        started = time.monotonic()
        try:
            path = ensure_built()
        except BuildError as error:
            self._outcome = f"kernels in plain torch, which are slower: {error}"
        else:
            self._outcome = f"kernels: {path} ({time.monotonic() - started:.1f} s)"
