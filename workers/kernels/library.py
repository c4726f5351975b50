"""The compiled kernels as Python functions. They take addresses and sizes: no tensor crosses, only numbers."""

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import torch

from workers.kernels.build import ensure_built

logger = logging.getLogger(__name__)

POINTER = ctypes.c_void_p
SIZE = ctypes.c_int64
FLOAT = ctypes.c_float

SUFFIXES = {torch.float32: "_f32", torch.bfloat16: "_bf16"}
"""The dtypes there are kernels for, and what their names end in."""

LONG_WORK = 1 << 29
"""Multiplications from which a call gives up the interpreter's lock: some milliseconds on two cores, about as long as a
thread that has given it up may wait until it gets it back."""


class Library:
    """The library of this process, built when it is missing."""

    def __init__(self) -> None:
        """Raises `workers.kernels.build.BuildError`, OSError when the library cannot be loaded."""
        path = str(ensure_built())
        # Most calls take microseconds and keep the interpreter's lock: giving it up may cost more than they do.
        try:
            self._holding = ctypes.PyDLL(path)
        except OSError as error:
            logger.warning("compiling the kernels again, for they cannot be loaded: %s", error)
            path = str(ensure_built(anew=True))
            self._holding = ctypes.PyDLL(path)
        self._releasing = ctypes.CDLL(path)

    def set_num_threads(self, count: int) -> None:
        """Threads of every kernel from now on, at least 1; call it while none runs."""
        if count < 1:
            raise ValueError(f"kernels cannot run on {count} threads")
        if (found := self.function("set_num_threads", ctypes.c_int)(count)) < count:
            logger.warning("the system allows the kernels %d threads of %d", found, count)

    def function(self, name: str, *arguments: type, releases_lock: bool = False) -> Callable[..., int]:
        """A C function that returns an int or nothing. `releases_lock`: it waits, or takes long: others should run."""
        found = getattr(self._releasing if releases_lock else self._holding, name)
        found.argtypes = arguments
        found.restype = ctypes.c_int
        function: Callable[..., int] = found
        return function


@cache
def library() -> Library:
    """Loaded once. Raises as `Library` does."""
    return Library()
