"""The ways in which the compiled kernels multiply bfloat16: each must be right wherever it can run."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from workers.kernels.library import library

WAYS = ("tiles", "vectors")


@contextmanager
def multiplying_by(way: str) -> Iterator[None]:
    """Skips the test on a machine that does not have this way."""
    set_tiles = library().function("set_tiles", ctypes.c_int)
    had_them = bool(set_tiles(1))
    if way == "tiles" and not had_them:
        pytest.skip("no matrix tiles here")
    set_tiles(int(way == "tiles"))
    try:
        yield
    finally:
        set_tiles(1)
