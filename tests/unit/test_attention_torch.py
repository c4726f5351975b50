import pytest
import torch
from dense_attention import largest_error
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import build_metadata, shuffled_tables

from workers.attention import select_backend
from workers.attention.torch_backend import TorchAttention

CPU = torch.device("cpu")
BACKEND = TorchAttention()


@st.composite
def batches(draw: st.DrawFn) -> dict[str, object]:
    num_reqs = draw(st.integers(1, 6))
    kv_heads = draw(st.integers(1, 3))
    lens = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 70))
    return {
        "query_lens": draw(st.lists(lens, min_size=num_reqs, max_size=num_reqs)),
        "contexts": draw(st.lists(st.one_of(st.just(0), st.integers(0, 90)), min_size=num_reqs, max_size=num_reqs)),
        "query_heads": kv_heads * draw(st.integers(1, 4)),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 16])),
        "block_size": draw(st.sampled_from([1, 4, 16])),
        "window": draw(st.one_of(st.none(), st.integers(1, 100))),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=150, deadline=None)
@given(batches())
def test_any_mixed_batch_equals_dense_attention(batch: dict[str, object]) -> None:
    assert largest_error(BACKEND, **batch) < 2e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 300])
def test_a_chunk_a_decode_and_a_fresh_prompt_in_one_step(window: int | None) -> None:
    query_lens, contexts = [1024, 1, 128], [1024, 2048, 0]
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    tables, _ = shuffled_tables(seq_lens, 16, seed=0)
    metadata = build_metadata(query_lens, seq_lens, tables, 16)
    assert metadata.query_start_loc.tolist() == [0, 1024, 1025, 1153]
    assert metadata.seq_lens.tolist() == [2048, 2049, 128]
    assert metadata.slot_mapping.shape == (1153,)
    error = largest_error(
        BACKEND, query_lens, contexts, query_heads=2, kv_heads=1, head_dim=16, block_size=16, window=window
    )
    assert error < 2e-5


def test_a_chunk_longer_than_a_tile() -> None:
    error = largest_error(BACKEND, [1100], [50], query_heads=1, kv_heads=1, head_dim=8, block_size=16, window=None)
    assert error < 2e-5


def test_bfloat16_is_as_good_as_its_inputs() -> None:
    error = largest_error(
        BACKEND,
        [1, 40, 1, 3],
        [300, 20, 17, 64],
        query_heads=9,
        kv_heads=3,
        head_dim=64,
        block_size=16,
        window=None,
        dtype=torch.bfloat16,
    )
    assert error < 0.01  # one rounding of an output of magnitude about 1


def test_decodes_of_similar_length_are_one_call_and_read_no_foreign_half() -> None:
    seq_lens = [100, 120, 65, 128, 500, 300]
    tables, num_blocks = shuffled_tables(seq_lens, 16, seed=1)
    cache = torch.zeros(BACKEND.kv_cache_shape(num_blocks, 16, 3, 8))
    step = BACKEND.prepare(build_metadata([1] * 6, seq_lens, tables, 16), cache, None)
    assert [group.num_reqs for group in step.groups] == [4, 2]
    assert [group.kv_rows.shape[0] for group in step.groups] == [4 * 3 * 8, 2 * 3 * 32]


def test_a_window_bounds_what_a_decode_reads() -> None:
    tables, num_blocks = shuffled_tables([1000], 16, seed=1)
    cache = torch.zeros(BACKEND.kv_cache_shape(num_blocks, 16, 1, 8))
    step = BACKEND.prepare(build_metadata([1], [1000], tables, 16), cache, 32)
    assert step.groups[0].kv_rows.tolist() == tables[0][968 // 16 :]  # it sees tokens 968 to 999


def test_auto_takes_torch_on_a_cpu() -> None:
    assert select_backend("auto", CPU, torch.float32, 64).name == "torch"
    assert select_backend("torch", CPU, torch.float32, 64).name == "torch"


def test_an_unknown_backend_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="'fast' is unknown; there are: auto, torch, flash"):
        select_backend("fast", CPU, torch.float32, 64)
