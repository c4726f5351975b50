"""The native leaf's own promises: a row's bits depend on its sequence alone, and what it refuses it names."""

import ctypes
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_ways import WAYS, multiplying_by
from paged_batches import build_metadata, shuffled_tables

from workers.attention import AttentionBackend, select_backend
from workers.attention.native_backend import _MERGE_WORDS, _PIECE_WORDS, NativeStep, _Step
from workers.kernels.build import BuildError
from workers.kernels.library import library
from workers.rope import HeadNorms

CPU = torch.device("cpu")
BLOCK = 16


@pytest.fixture(autouse=True, params=WAYS)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with multiplying_by(request.param):
        yield


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    library().set_num_threads(request.param)
    yield request.param
    library().set_num_threads(1)


@dataclass(frozen=True)
class Sequences:
    """Sequences of random queries, keys and values, [tokens, (q + 2 kv) * dim] each, with blocks of their own."""

    backend: AttentionBackend
    rows: list[torch.Tensor]
    tables: list[list[int]]
    cache: torch.Tensor
    query_heads: int
    head_dim: int

    def attend(
        self, requests: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int], window: int | None
    ) -> list[torch.Tensor]:
        """One step: the last query_lens tokens of the requests' first seq_lens -> their outputs."""
        metadata = build_metadata(query_lens, seq_lens, [self.tables[r] for r in requests], BLOCK)
        step = self.backend.prepare(metadata, self.cache, window)
        qkv = torch.cat([self.rows[r][n - q : n] for r, q, n in zip(requests, query_lens, seq_lens, strict=True)])
        cos_sin = torch.ones(len(qkv), 2, self.head_dim, dtype=qkv.dtype)
        q = self.backend.rotate_and_write(qkv, cos_sin, None, self.query_heads, self.cache, step)
        return list(self.backend.attend(q, self.cache, step, self.head_dim**-0.5).split(list(query_lens)))


def sequences(lens: Sequence[int], dtype: torch.dtype, query_heads: int, kv_heads: int, head_dim: int) -> Sequences:
    generator = torch.Generator().manual_seed(len(lens))
    backend = select_backend("native", CPU, dtype, head_dim)
    tables, num_blocks = shuffled_tables(lens, BLOCK, seed=1)
    cache = torch.full(backend.kv_cache_shape(num_blocks, BLOCK, kv_heads, head_dim), float("nan"), dtype=dtype)
    width = (query_heads + 2 * kv_heads) * head_dim
    rows = [torch.randn(n, width, generator=generator).to(dtype) for n in lens]
    return Sequences(backend, rows, tables, cache, query_heads, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("query_heads", "head_dim"), [(9, 64), (4, 48)])
def test_a_rows_bits_do_not_depend_on_batch_chunks_or_threads(
    threads: int, dtype: torch.dtype, window: int | None, query_heads: int, head_dim: int
) -> None:
    """Each token alone, one after the other, against random chunks in random company."""
    kv_heads = query_heads // (3 if query_heads == 9 else 4)
    lens = [700, 3, 290]
    alone = sequences(lens, dtype, query_heads, kv_heads, head_dim)
    library().set_num_threads(1)
    expected = [torch.cat([alone.attend([r], [1], [i + 1], window)[0] for i in range(n)]) for r, n in enumerate(lens)]
    library().set_num_threads(threads)
    together = sequences(lens, dtype, query_heads, kv_heads, head_dim)
    chooser = random.Random(threads)
    done = [0] * len(lens)
    while any(d < n for d, n in zip(done, lens, strict=True)):
        requests = [r for r, n in enumerate(lens) if done[r] < n]
        query_lens = [min(chooser.choice([1, 2, 5, 30, 200]), lens[r] - done[r]) for r in requests]
        seq_lens = [done[r] + q for r, q in zip(requests, query_lens, strict=True)]
        for r, end, out in zip(
            requests, seq_lens, together.attend(requests, query_lens, seq_lens, window), strict=True
        ):
            assert torch.equal(out, expected[r][done[r] : end])
            done[r] = end


def test_a_long_decode_is_work_for_many_threads_and_a_chunk_goes_first() -> None:
    rows = sequences([5000, 300], torch.float32, 6, 2, 16)
    metadata = build_metadata([1, 200], [5000, 300], rows.tables, BLOCK)
    step = rows.backend.prepare(metadata, rows.cache, None)
    assert isinstance(step, NativeStep)
    step.address(6)
    plan = step._planned
    assert plan is not None
    pieces = step._held[0].view(-1, 8)  # request, head, token, tokens, block, blocks, merge, part
    of_chunk = pieces[: 2 * 13]
    assert of_chunk[:, 0].tolist() == [1] * 26
    assert of_chunk[:, 3].sum() == 2 * 200
    of_decode = pieces[26:]
    assert of_decode.shape[0] == 2 * 20
    assert of_decode[:, 5].tolist() == [1] * 40
    assert sorted(set(of_decode[:, 6].tolist())) == [0, 1]


def test_a_window_bounds_the_blocks_of_keys_that_are_read() -> None:
    rows = sequences([5000], torch.float32, 1, 1, 16)
    step = rows.backend.prepare(build_metadata([1], [5000], rows.tables, BLOCK), rows.cache, 300)
    assert isinstance(step, NativeStep)
    step.address(1)
    assert step._held[0].view(-1, 8)[:, 4].tolist() == [4700 // 256, 4700 // 256 + 1]


def test_infinite_scores_and_what_is_not_a_number_stay_visible() -> None:
    """An overflow in the model must come out as such, not as a plausible token."""
    rows = sequences([20], torch.float32, 2, 1, 16)
    rows.rows[0][5, 0] = float("nan")  # a query of head 0
    (out,) = rows.attend([0], [20], [20], None)
    assert out[5, 0].isnan().all()
    assert out[:5].isfinite().all()
    assert out[5, 1].isfinite().all()
    assert out[6:].isfinite().all()


def test_an_infinite_query_gives_no_number_in_its_row_and_head() -> None:
    for infinity in (float("inf"), float("-inf")):
        rows = sequences([20], torch.float32, 2, 1, 16)
        rows.rows[0][5, 0] = infinity
        (out,) = rows.attend([0], [20], [20], None)
        assert out[5, 0].isnan().all()
        assert out[5, 1].isfinite().all()
        assert out[torch.arange(20) != 5].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [20, 300])
def test_an_infinite_key_hides_itself_or_spoils_whoever_sees_it(dtype: torch.dtype, length: int) -> None:
    rows = sequences([length], dtype, 1, 1, 16)
    packed = rows.rows[0]
    packed[5, 16] = float("inf")  # of the key; turned by angles of which all sines are 1, it lies in two dimensions
    (out,) = rows.attend([0], [length], [length], None)
    assert out[:5].isfinite().all()
    product = packed[:, 0] + packed[:, 8]  # what the query has in these two
    for row in range(5, length):
        assert out[row].isnan().all() if product[row] > 0 else out[row].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_infinite_value_spoils_its_dimension_of_its_own_sequence(dtype: torch.dtype) -> None:
    """Rows that do not see it yet weigh it by 0, which gives no number; those that do, infinity."""
    rows = sequences([300, 20], dtype, 1, 1, 16)
    rows.rows[0][5, 32 + 3] = float("-inf")
    out, other = rows.attend([0, 1], [300, 20], [300, 20], None)
    assert other.isfinite().all()
    assert out[:5, 0, 3].isnan().all()
    assert (out[5:, 0, 3] == float("-inf")).all()
    assert out[:, 0, torch.arange(16) != 3].isfinite().all()


def test_auto_takes_native_on_a_cpu_and_torch_where_native_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    assert select_backend("auto", CPU, torch.float32, 64, 0).name == "native"
    assert select_backend("auto", CPU, torch.bfloat16, 128, 32).name == "native"
    assert select_backend("torch", CPU, torch.float32, 64, 0).name == "torch"
    caplog.set_level(logging.INFO)
    assert select_backend("auto", CPU, torch.float32, 24, 0).name == "torch"
    assert "head_dim of a multiple of 16 up to 256, not 24: using 'torch'" in caplog.text
    assert select_backend("auto", CPU, torch.float32, 64, 0, 48).name == "native"
    assert select_backend("auto", CPU, torch.float32, 64, 0, 49).name == "torch"
    assert "up to 48 query heads for every KV head, not 49: using 'torch'" in caplog.text
    assert select_backend("auto", CPU, torch.float32, 64, 24).name == "torch"
    assert "block_size is 24; attention backend 'native' needs a multiple of 16: using 'torch'" in caplog.text


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "missing"),
    [
        ("cuda", torch.bfloat16, 64, "needs a CPU; this device is cuda"),
        ("cpu", torch.float16, 64, "needs float32 or bfloat16; the dtype is torch.float16"),
        ("cpu", torch.bfloat16, 8, "head_dim of a multiple of 16 up to 256, not 8"),
        ("cpu", torch.bfloat16, 272, "head_dim of a multiple of 16 up to 256, not 272"),
    ],
)
def test_what_it_cannot_run_on_is_named(device: str, dtype: torch.dtype, head_dim: int, missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        select_backend("native", torch.device(device), dtype, head_dim)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbuilt() -> None:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr("workers.attention.native_backend.library", unbuilt)
    with pytest.raises(ValueError, match=r"needs its compiled kernels \(no C\+\+ compiler\)"):
        select_backend("native", CPU, torch.float32, 64)
    assert select_backend("auto", CPU, torch.float32, 64, 0).name == "torch"


def test_block_sizes_and_heads_it_cannot_page_are_refused() -> None:
    backend = select_backend("native", CPU, torch.float32, 64)
    assert backend.kv_cache_shape(5, 32, 3, 64) == (5, 3, 2, 2, 16, 64)
    with pytest.raises(ValueError, match=r"block_size is 24; .* needs a multiple of 16"):
        backend.kv_cache_shape(5, 24, 3, 64)
    cache = torch.zeros(backend.kv_cache_shape(2, 16, 2, 64))
    step = backend.prepare(build_metadata([1], [1], [[0]], 16), cache, None)
    with pytest.raises(ValueError, match="not 3 for 2"):
        backend.attend(torch.zeros(1, 3, 64), cache, step, 1.0)


def test_the_structures_of_a_step_are_laid_out_as_in_c() -> None:
    assert ctypes.sizeof(_Step) == library().function("step_bytes")()
    assert library().function("piece_bytes")() == 4 * _PIECE_WORDS
    assert library().function("merge_bytes")() == 4 * _MERGE_WORDS


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seq_lens": torch.tensor([3, 5])}, r"seq_lens of torch.int32 \[2\] .* not torch.int64"),
        ({"query_start_loc": torch.tensor([0, 1], dtype=torch.int32)}, r"query_start_loc of torch.int32 \[3\]"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"block_table of torch.int32 \[2, 1\]"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int32)[:, ::2]}, "block_table .* without gaps"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int32)}, "slot_mapping of torch.int64"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, r"slot_mapping of torch.int64 \[2\] .* \[3\]"),
        ({"max_seq_len": 17}, "a block table of 1 columns ends before token 17"),
    ],
)
def test_a_batch_that_would_be_misread_is_refused(changes: dict[str, Any], named: str) -> None:
    backend = select_backend("native", CPU, torch.float32, 16)
    cache = torch.zeros(backend.kv_cache_shape(2, 16, 1, 16))
    metadata = replace(build_metadata([1, 1], [3, 5], [[0], [1]], 16), **changes)
    with pytest.raises(ValueError, match=named):
        backend.prepare(metadata, cache, None)
    with pytest.raises(ValueError, match="is not laid out by"):
        backend.prepare(metadata, cache[0], None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qkv": torch.zeros(2, 64)}, r"queries, keys and values of torch.float32 \[1, 64\] .* \[2, 64\]"),
        ({"qkv": torch.zeros(1, 64, dtype=torch.bfloat16)}, "queries, keys and values .* not torch.bfloat16"),
        ({"qkv": torch.zeros(1, 128)[:, ::2]}, "queries, keys and values .* without gaps"),
        ({"cos_sin": torch.zeros(1, 16)}, r"rotations of torch.float32 \[1, 2, 16\]"),
        ({"cos_sin": torch.zeros(1, 2, 16, dtype=torch.float64)}, "rotations .* not torch.float64"),
        ({"norms": HeadNorms(torch.zeros(16), torch.zeros(8), 0.0)}, r"the keys' norm of torch.float32 \[16\]"),
        ({"norms": HeadNorms(torch.zeros(16).bfloat16(), torch.zeros(16), 0.0)}, "the queries' norm"),
        ({"num_query_heads": 3}, r"queries, keys and values of torch.float32 \[1, 80\]"),
        ({"kv_cache": torch.zeros(2, 1, 1, 2, 16, 16).bfloat16()}, "the cache of torch.float32"),
        ({"kv_cache": torch.zeros(1, 1, 1, 2, 16, 16)}, "the cache of torch.float32"),
    ],
)
def test_what_would_be_misread_is_refused(changes: dict[str, Any], named: str) -> None:
    backend = select_backend("native", CPU, torch.float32, 16)
    cache = torch.zeros(backend.kv_cache_shape(2, 16, 1, 16))
    step = backend.prepare(build_metadata([1], [3], [[0]], 16), cache, None)
    arguments = {
        "qkv": torch.zeros(1, 64),
        "cos_sin": torch.zeros(1, 2, 16),
        "norms": None,
        "num_query_heads": 2,
        "kv_cache": cache,
        "step": step,
    }
    q = backend.rotate_and_write(**arguments)
    with pytest.raises(ValueError, match=named):
        backend.rotate_and_write(**{**arguments, **changes})
    if "kv_cache" in changes:
        with pytest.raises(ValueError, match=named):
            backend.attend(q, changes["kv_cache"], step, 1.0)
    for wrong in (torch.zeros(2, 2, 16), q.double(), torch.zeros(1, 2, 32)[:, :, ::2]):
        with pytest.raises(ValueError, match=r"needs queries of torch.float32 \[1, 2, 16\]"):
            backend.attend(wrong, cache, step, 1.0)
