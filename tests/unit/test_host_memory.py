"""Host memory: zeros, apart from each other, and the same after it was touched behind the work."""

import torch

from workers.host_memory import HugePages, touch_behind


def test_pieces_are_zeroed_aligned_and_apart() -> None:
    memory = HugePages(chunk_bytes=1 << 20)
    pieces = [memory.take(size) for size in (1, 64, 100, (1 << 20) - 64, 3 << 20, 7)]
    for number, piece in enumerate(pieces, 1):
        assert not piece.any()
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    assert [(int(piece.min()), int(piece.max())) for piece in pieces] == [(n, n) for n in range(1, 7)]


def test_touching_keeps_what_is_there() -> None:
    memory = HugePages().take(9 << 20)
    memory[3::4096] = 5
    before = memory.clone()
    thread = touch_behind(memory)
    memory[: 1 << 16] = 7
    before[: 1 << 16] = 7
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(memory, before)


def test_memory_that_is_smaller_than_a_page() -> None:
    memory = HugePages().take(10)[3:7]
    touch_behind(memory).join(60)
    assert not memory.any()
