"""Which slices of a model one tensor-parallel rank holds. Pure arithmetic."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's contiguous shares, as ranges of indices."""

    query_heads: range
    kv_heads: range
    ffn: range
    """Columns of the feed-forward layer's inner dimension."""
    vocab: range
    """Rows of the embedding and of the head."""


def even_slice(total: int, rank: int, size: int) -> range:
    """Rank's share of `total` things in order; shares differ by at most one, the larger ones first."""
    share, extra = divmod(total, size)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


def heads_of(rank: int, size: int, num_query_heads: int, num_kv_heads: int) -> tuple[range, range]:
    """(query heads, KV heads) of a rank, for a size that `works`.

    Up to one rank a KV head, ranks hold whole KV groups, unevenly if need be. Beyond that each KV head is
    replicated on size / num_kv_heads ranks, which split the group's query heads (evenly up to one).
    """
    group = num_query_heads // num_kv_heads
    if size <= num_kv_heads:
        kv = even_slice(num_kv_heads, rank, size)
        return range(kv.start * group, kv.stop * group), kv
    head, part = divmod(rank, size // num_kv_heads)
    share = even_slice(group, part, size // num_kv_heads)
    return range(head * group + share.start, head * group + share.stop), range(head, head + 1)


def works(size: int, num_query_heads: int, num_kv_heads: int) -> bool:
    """Whether every rank gets whole KV groups, or at least one query head of a group that it shares."""
    if size <= num_kv_heads:
        return size >= 1
    return size % num_kv_heads == 0 and size <= num_query_heads


def partition(
    rank: int, size: int, num_query_heads: int, num_kv_heads: int, ffn_size: int, vocab_size: int
) -> Partition:
    """Rank's shares of a model over `size` ranks.

    Raises ValueError, naming the nearest sizes that work, for a size that splits the heads in no such way.
    """
    if not works(size, num_query_heads, num_kv_heads):
        sizes = [n for n in range(1, num_query_heads + 1) if works(n, num_query_heads, num_kv_heads)]
        nearest = " or ".join(str(n) for n in [n for n in sizes if n < size][-1:] + [n for n in sizes if n > size][:1])
        raise ValueError(
            f"tensor_parallel_size {size} cannot split {num_query_heads} query heads in {num_kv_heads} KV groups:"
            f" beyond {num_kv_heads} it must be a multiple of {num_kv_heads}, up to {num_query_heads};"
            f" the nearest sizes that work: {nearest}"
        )
    if size > min(ffn_size, vocab_size):
        raise ValueError(
            f"tensor_parallel_size {size} exceeds the feed-forward size {ffn_size} or vocabulary {vocab_size}"
        )
    query_heads, kv_heads = heads_of(rank, size, num_query_heads, num_kv_heads)
    return Partition(query_heads, kv_heads, even_slice(ffn_size, rank, size), even_slice(vocab_size, rank, size))
