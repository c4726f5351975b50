import pytest
import torch
from paged_batches import build_metadata, shuffled_tables

from workers.attention import select_backend
from workers.attention.torch_backend import TorchAttention

CPU = torch.device("cpu")
BACKEND = TorchAttention()


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


def test_an_unknown_backend_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="'fast' is unknown; there are: auto, torch, flash, native"):
        select_backend("fast", CPU, torch.float32, 64)
