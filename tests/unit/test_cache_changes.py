"""Deltas of the prefix cache: whoever applies them holds what the cache holds."""

import random

from scheduler.block_pool import BlockPool
from scheduler.cache_changes import CacheChanges


def test_what_came_and_went_in_between_leaves_no_trace() -> None:
    changes = CacheChanges()
    changes.add(b"a")
    changes.add(b"b")
    changes.remove(b"a")
    assert changes.take() == ([b"b"], [])
    changes.remove(b"b")
    changes.add(b"b")
    assert changes.take() == ([], [])


def test_a_copy_that_follows_the_changes_equals_the_cache() -> None:
    rng = random.Random(0)
    pool, copy = BlockPool(8), set[bytes]()
    held: list[int] = []
    seen = 0
    for _ in range(3000):
        action = rng.random()
        if action < 0.4 and pool.num_free_blocks:
            held += pool.allocate(1)
        elif action < 0.7 and held:
            pool.publish(rng.choice(held), b"%d" % rng.randrange(12))
        elif action < 0.95 and held:
            pool.release([held.pop(rng.randrange(len(held)))])
        elif action > 0.99:
            pool.forget_all()
        if rng.random() < 0.3:
            added, removed = pool.changes.take()
            assert copy.isdisjoint(added)
            assert copy.issuperset(removed)
            copy = copy.difference(removed).union(added)
            assert copy == set(pool.cached_hashes())
            seen += len(added)
    assert seen > 100
