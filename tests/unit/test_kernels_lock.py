"""Long calls give up the interpreter's lock, short ones keep it."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paged_batches import build_metadata

from workers.attention.native_backend import NativeAttention
from workers.kernels.library import LONG_WORK, library
from workers.kernels.linear import PackedGatedLinear, PackedLinear

ATTEMPTS = 100
"""Of a call of milliseconds: in one of them the system gives the other thread a processor."""


class Watcher:
    """Another thread, and whether it has run while a call was in C."""

    def __init__(self) -> None:
        self.ran_inside = False
        self._inside = False
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def watch(self, owner: object, name: str) -> None:
        """The C function that `owner` holds under this name."""
        function: Callable[..., int] = getattr(owner, name)

        def call(*arguments: Any) -> int:
            self._inside = True
            result = function(*arguments)
            self._inside = False
            return result

        setattr(owner, name, call)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped:
            self.ran_inside |= self._inside
            time.sleep(1e-4)


@pytest.fixture(autouse=True)
def _lock_is_only_given_up() -> Iterator[None]:
    """By whoever has it, and never taken away from him."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def _product(rows: int) -> Callable[[Watcher], Callable[[], object]]:
    def layer(watcher: Watcher) -> Callable[[], object]:
        weight = torch.ones(512, 512, dtype=torch.bfloat16)
        product = PackedLinear(weight)
        for name in ("_multiply", "_multiply_long"):
            watcher.watch(product, name)
        x = torch.ones(rows, 512, dtype=torch.bfloat16)
        return lambda: product(x)

    return layer


def _gated_product(rows: int) -> Callable[[Watcher], Callable[[], object]]:
    def layer(watcher: Watcher) -> Callable[[], object]:
        weight = torch.ones(256, 512, dtype=torch.bfloat16)
        product = PackedGatedLinear(weight, weight)
        for name in ("_multiply", "_multiply_long"):
            watcher.watch(product, name)
        x = torch.ones(rows, 512, dtype=torch.bfloat16)
        return lambda: product(x)

    return layer


def _attention(tokens: int) -> Callable[[Watcher], Callable[[], object]]:
    def leaf(watcher: Watcher) -> Callable[[], object]:
        backend = NativeAttention(torch.device("cpu"), torch.float32, 64)
        for name in ("_attend", "_attend_long"):
            watcher.watch(backend, name)
        cache = torch.zeros(backend.kv_cache_shape(64, 16, 1, 64))
        metadata = build_metadata([tokens], [1024], [list(range(64))], 16)
        q = torch.ones(tokens, 4, 64)
        return lambda: backend.attend(q, cache, backend.prepare(metadata, cache, None), 1.0)

    return leaf


@pytest.mark.parametrize(
    "made", [_product(8192), _gated_product(8192), _attention(1024)], ids=["product", "gated product", "attention"]
)
def test_another_thread_runs_during_a_long_call(made: Callable[[Watcher], Callable[[], object]]) -> None:
    library().set_num_threads(1)
    with Watcher() as watcher:
        call = made(watcher)
        for _ in range(ATTEMPTS):
            call()
            if watcher.ran_inside:
                return
    pytest.fail(f"no other thread ran in any of {ATTEMPTS} calls")


@pytest.mark.parametrize(
    "made", [_product(32), _gated_product(32), _attention(1)], ids=["product", "gated product", "attention"]
)
def test_no_other_thread_runs_during_a_short_call(made: Callable[[Watcher], Callable[[], object]]) -> None:
    with Watcher() as watcher:
        call = made(watcher)
        for _ in range(ATTEMPTS):
            call()
    assert not watcher.ran_inside


def test_a_product_is_long_by_what_it_multiplies_or_reads() -> None:
    layer = PackedLinear(torch.ones(512, 512, dtype=torch.bfloat16))
    assert layer._long_rows == LONG_WORK // 512**2
    assert PackedLinear(torch.ones(1, 3, dtype=torch.bfloat16))._long_rows == -(-LONG_WORK // 3)
