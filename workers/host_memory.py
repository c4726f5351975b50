"""Large pieces of the host's memory: in huge pages, zeroed when they are first touched, touched behind the work."""

import contextlib
import ctypes
import mmap
import threading
import time

import torch

_ALIGNMENT = 64
_PIECE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; what a page holds stays
_REST = 4
"""So many times as long as it has worked, the thread that touches memory rests: it shares the cores with steps."""


class HugePages:
    """Memory in pages of 2 MiB where the system has them, taken from it in chunks. With pages of 4 KiB the search for
    their addresses takes up to half of the time that reading weights takes. A chunk is freed with the last tensor in
    it."""

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """`size` bytes, aligned to 64, as zeros: uint8 [size]."""
        if size > len(self._free):
            pages = mmap.mmap(-1, max(size, self._chunk_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    pages.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(pages, dtype=torch.uint8)
        taken, self._free = self._free[:size], self._free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken


def touch_behind(memory: torch.Tensor) -> threading.Thread:
    """Let the system find pages for `memory` before its first use, in a thread, with rests; contents stay as they are.

    To find and zero 2 GiB takes seconds, which start-up need not wait for: what is used earlier is found then. Ends
    early, and does no harm, on a system that cannot do it. `memory` lives until the thread has ended.
    """
    thread = threading.Thread(target=_touch, args=(memory,), name="touch-memory", daemon=True)
    thread.start()
    return thread


def _touch(memory: torch.Tensor) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = memory.data_ptr() + memory.nbytes
    while address < end:
        began = time.perf_counter()
        if madvise(address, min(_PIECE_BYTES, end - address), _MADV_POPULATE_WRITE) != 0:
            return
        address += _PIECE_BYTES
        time.sleep(_REST * (time.perf_counter() - began))
