"""What every backend that runs on a CPU must equal: naive attention, for any batch."""

import pytest
import torch
from dense_attention import batches, largest_error
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import build_metadata, shuffled_tables

from workers.attention import select_backend

CPU = torch.device("cpu")
BACKENDS = ("torch", "native")


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@settings(max_examples=150, deadline=None)
@given(batches(head_dims=[8, 16], block_sizes=[1, 4, 16]))
def test_any_mixed_batch_equals_dense_attention_in_torch(batch: dict[str, object]) -> None:
    assert largest_error(select_backend("torch", CPU, torch.float32, 16), **batch) < 2e-5  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(batches(head_dims=[16, 32, 48, 64, 80, 96, 128], block_sizes=[16, 32]))
def test_any_mixed_batch_equals_dense_attention_in_native(batch: dict[str, object]) -> None:
    backend = select_backend("native", CPU, torch.float32, 16)
    assert largest_error(backend, **batch) < 1e-5  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(batches(head_dims=[16, 48, 64, 128], block_sizes=[16, 48]), st.sampled_from(BACKENDS))
def test_any_mixed_batch_in_bfloat16_is_as_good_as_its_inputs(batch: dict[str, object], name: str) -> None:
    backend = select_backend(name, CPU, torch.bfloat16, 16)
    assert largest_error(backend, dtype=torch.bfloat16, **batch) < 0.06  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 300])
def test_a_chunk_a_decode_and_a_fresh_prompt_in_one_step(name: str, window: int | None) -> None:
    query_lens, contexts = [1024, 1, 128], [1024, 2048, 0]
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    tables, _ = shuffled_tables(seq_lens, 16, seed=0)
    metadata = build_metadata(query_lens, seq_lens, tables, 16)
    assert metadata.query_start_loc.tolist() == [0, 1024, 1025, 1153]
    assert metadata.seq_lens.tolist() == [2048, 2049, 128]
    assert metadata.slot_mapping.shape == (1153,)
    backend = select_backend(name, CPU, torch.float32, 16)
    error = largest_error(
        backend, query_lens, contexts, query_heads=2, kv_heads=1, head_dim=16, block_size=16, window=window
    )
    assert error < 2e-5


def test_a_chunk_longer_than_a_tile(name: str) -> None:
    backend = select_backend(name, CPU, torch.float32, 16)
    error = largest_error(backend, [1100], [50], query_heads=1, kv_heads=1, head_dim=16, block_size=16, window=None)
    assert error < 2e-5


def test_bfloat16_is_as_good_as_its_inputs(name: str) -> None:
    backend = select_backend(name, CPU, torch.bfloat16, 64)
    error = largest_error(
        backend,
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
