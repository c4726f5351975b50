"""The pool of KV blocks: who references each, which are free, and which hold known content.

Block ids are 0 .. num_blocks - 1. The free list is also the order of reuse: blocks without a hash
first, then cached blocks, least recently freed first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from scheduler.cache_changes import CacheChanges


class BlockPool:
    """Reference counts, free list and prefix cache map of a fixed number of blocks.

    `enable_caching` False: nothing is ever published, so every lookup misses.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self.changes = CacheChanges()
        """Of the prefix cache, for whoever mirrors it."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody references, cached ones included."""
        return len(self._free)

    def block_hash(self, block_id: int) -> bytes | None:
        """The content hash that the block carries in the prefix cache, or None."""
        return self._hashes[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, forgetting what they cached. The caller has checked `num_free_blocks`."""
        block_ids = []
        for _ in range(num_blocks):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self.ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block (a prefix-cache hit); free ones leave the free list."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._free[block_id]
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each, in the order given: of cached blocks the first is reused first."""
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._block_by_hash.get(block_hash)

    def cached_hashes(self) -> list[bytes]:
        """The content of the prefix cache, in no particular order."""
        return list(self._block_by_hash)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Offer a referenced full block to the prefix cache. The first block of a content keeps the hash."""
        if self.enable_caching and block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash
            self.changes.add(block_hash)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Take referenced blocks out of the prefix cache: their content is not to be trusted."""
        for block_id in block_ids:
            self._forget(block_id)

    def forget_all(self) -> None:
        """Empty the prefix cache: the memory behind the blocks is gone."""
        for block_hash in self._block_by_hash:
            self.changes.remove(block_hash)
        self._block_by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def check_integrity(self, tables: Mapping[str, Sequence[int]]) -> None:
        """Prove the pool against the block tables of all requests. Raises AssertionError at the first lie.

        Every block is free or referenced, never both; counts equal the tables' references; hashes and
        blocks map one to one, so that no hash points at a block that was reused.
        """
        references = Counter(block_id for table in tables.values() for block_id in table)
        for block_id, count in enumerate(self.ref_counts):
            if count != references[block_id]:
                raise AssertionError(f"block {block_id} counts {count} references, tables hold {references[block_id]}")
            if (count == 0) != (block_id in self._free):
                raise AssertionError(f"block {block_id} has {count} references; in free list: {block_id in self._free}")
        if references.keys() - set(range(self.num_blocks)):
            raise AssertionError(
                f"tables hold unknown blocks {sorted(references.keys() - set(range(self.num_blocks)))}"
            )
        for request_id, table in tables.items():
            if len(set(table)) != len(table):
                raise AssertionError(f"the table of {request_id!r} holds a block twice: {list(table)}")
        hashed = {block_hash: block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None}
        if hashed != self._block_by_hash:
            raise AssertionError(f"hashes of blocks {hashed} differ from the cache map {self._block_by_hash}")

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block_id] = None
            self.changes.remove(block_hash)
