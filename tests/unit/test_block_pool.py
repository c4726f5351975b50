"""The block pool: references, order of reuse, the cache map, and its proof of itself."""

import pytest

from scheduler.block_pool import BlockPool


def test_allocated_blocks_are_distinct_and_leave_the_free_list() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(3)
    assert len(set(block_ids)) == 3
    assert pool.num_free_blocks == 1
    pool.check_integrity({"r": block_ids})


def test_a_shared_block_is_free_only_when_the_last_reference_goes() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.acquire(block_ids)
    pool.check_integrity({"a": block_ids, "b": block_ids})
    pool.release(block_ids)
    assert pool.num_free_blocks == 1
    pool.release(block_ids)
    assert pool.num_free_blocks == 2
    pool.check_integrity({})


def test_blocks_without_a_hash_are_reused_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    for block_id in (a, b, c):
        pool.publish(block_id, b"%d" % block_id)
    pool.release([b, d, a, c])
    assert pool.allocate(4) == [d, b, a, c]


def test_a_hit_takes_a_cached_block_out_of_the_free_list() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"h")
    pool.release([block_id])
    assert pool.lookup(b"h") == block_id
    pool.acquire([block_id])
    assert pool.num_free_blocks == 1
    assert pool.allocate(1) != [block_id]
    assert pool.lookup(b"h") == block_id


def test_a_reused_block_forgets_what_it_cached() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.publish(block_ids[0], b"h")
    pool.release(block_ids)
    pool.allocate(1)
    assert pool.lookup(b"h") is None
    assert pool.block_hash(block_ids[0]) is None


def test_the_first_block_keeps_a_hash() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"h")
    pool.publish(second, b"h")
    assert pool.lookup(b"h") == first
    assert pool.block_hash(second) is None


def test_withdrawn_blocks_cannot_be_found() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(2)
    pool.publish(block_ids[0], b"h")
    pool.withdraw(block_ids)
    assert pool.lookup(b"h") is None
    pool.check_integrity({"r": block_ids})


def test_forgetting_all_empties_the_cache_and_keeps_references() -> None:
    pool = BlockPool(3)
    block_ids = pool.allocate(2)
    for block_id in block_ids:
        pool.publish(block_id, b"%d" % block_id)
    pool.forget_all()
    assert [pool.lookup(b"%d" % block_id) for block_id in block_ids] == [None, None]
    pool.check_integrity({"r": block_ids})


def test_without_caching_nothing_is_published() -> None:
    pool = BlockPool(1, enable_caching=False)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"h")
    assert pool.lookup(b"h") is None


def leaked(pool: BlockPool, block_ids: list[int]) -> dict[str, list[int]]:
    return {}


def free_and_referenced(pool: BlockPool, block_ids: list[int]) -> dict[str, list[int]]:
    pool._free[block_ids[0]] = None
    return {"r": block_ids}


def not_counted(pool: BlockPool, block_ids: list[int]) -> dict[str, list[int]]:
    return {"r": block_ids, "thief": block_ids[:1]}


def twice_in_a_table(pool: BlockPool, block_ids: list[int]) -> dict[str, list[int]]:
    pool.acquire(block_ids[:1])
    return {"r": [*block_ids, block_ids[0]]}


def stale_hash(pool: BlockPool, block_ids: list[int]) -> dict[str, list[int]]:
    pool.publish(block_ids[0], b"h")
    pool._hashes[block_ids[0]] = None
    return {"r": block_ids}


def unknown_block(pool: BlockPool, block_ids: list[int]) -> dict[str, list[int]]:
    return {"r": [*block_ids, 99]}


@pytest.mark.parametrize(
    "corrupt", [leaked, free_and_referenced, not_counted, twice_in_a_table, stale_hash, unknown_block]
)
def test_the_proof_finds(corrupt: object) -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.check_integrity({"r": block_ids})
    tables = corrupt(pool, block_ids)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
