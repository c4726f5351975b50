import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.partition import Partition, even_slice, partition, works


@st.composite
def models(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(size, query heads, KV heads, ffn, vocabulary), whether or not the size works."""
    kv_heads = draw(st.integers(1, 8))
    query_heads = kv_heads * draw(st.integers(1, 8))
    return draw(st.integers(1, 70)), query_heads, kv_heads, draw(st.integers(64, 300)), draw(st.integers(64, 300))


def covered_once(parts: list[range], total: int) -> bool:
    return [i for part in parts for i in part] == list(range(total))


def spread(parts: list[range]) -> int:
    lengths = [len(part) for part in parts]
    return max(lengths) - min(lengths)


@given(models())
def test_every_part_is_covered_exactly_once_and_balanced(model: tuple[int, int, int, int, int]) -> None:
    size, query_heads, kv_heads, ffn, vocab = model
    if not works(size, query_heads, kv_heads) or size > 64:
        return
    shares = [partition(rank, size, *model[1:]) for rank in range(size)]
    assert covered_once([s.query_heads for s in shares], query_heads)
    assert covered_once([s.ffn for s in shares], ffn)
    assert spread([s.ffn for s in shares]) <= 1
    assert covered_once([s.vocab for s in shares], vocab)
    assert spread([s.vocab for s in shares]) <= 1
    assert {h for s in shares for h in s.kv_heads} == set(range(kv_heads))
    assert spread([s.kv_heads for s in shares]) <= 1
    group = query_heads // kv_heads
    if size <= kv_heads:
        assert covered_once([s.kv_heads for s in shares], kv_heads)
        assert spread([s.query_heads for s in shares]) <= group
    else:
        assert spread([s.query_heads for s in shares]) <= 1
    for share in shares:
        assert len(share.query_heads) >= 1
        # The heads a rank queries with are those of the KV heads it holds, equally many of each.
        assert {q // group for q in share.query_heads} == set(share.kv_heads)
        assert len(share.query_heads) % len(share.kv_heads) == 0


@given(models())
def test_a_size_is_refused_exactly_if_it_splits_a_group_unequally(model: tuple[int, int, int, int, int]) -> None:
    size, query_heads, kv_heads, ffn, vocab = model
    fits = size <= kv_heads or (size % kv_heads == 0 and size <= query_heads)
    if fits and size <= min(ffn, vocab):
        partition(0, size, *model[1:])
        return
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size} "):
        partition(0, size, *model[1:])


def test_nine_query_and_three_kv_heads() -> None:
    shares = [partition(rank, 2, 9, 3, 1536, 49152) for rank in range(2)]
    assert shares[0] == Partition(range(6), range(2), range(768), range(24576))
    assert shares[1] == Partition(range(6, 9), range(2, 3), range(768, 1536), range(24576, 49152))
    six = [partition(rank, 6, 9, 3, 1536, 49152) for rank in range(6)]
    assert [(list(s.query_heads), list(s.kv_heads)) for s in six] == [
        ([0, 1], [0]), ([2], [0]), ([3, 4], [1]), ([5], [1]), ([6, 7], [2]), ([8], [2]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "nearest"), [(4, "3 or 6"), (5, "3 or 6"), (7, "6 or 9"), (10, "9"), (0, "1")], ids=str
)
def test_the_refusal_names_the_nearest_sizes(size: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"the nearest sizes that work: {nearest}$"):
        partition(0, size, 9, 3, 1536, 49152)


def test_more_ranks_than_feed_forward_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the feed-forward size 3"):
        partition(0, 4, 8, 8, 3, 100)


def test_even_slices_put_the_larger_first() -> None:
    assert [even_slice(10, rank, 3) for rank in range(3)] == [range(4), range(4, 7), range(7, 10)]
