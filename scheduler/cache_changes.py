"""What came into the prefix cache and what left it, so that others can keep a copy of its hashes."""


class CacheChanges:
    """The difference between the cache as it was when `take` was last called and as it is now.

    What came and went in between leaves no trace: memory is bounded by the blocks of the pool, and by as many again.
    """

    def __init__(self) -> None:
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, block_hash: bytes) -> None:
        """A hash that the cache did not hold."""
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._added[block_hash] = None

    def remove(self, block_hash: bytes) -> None:
        """A hash that the cache held."""
        if block_hash in self._added:
            del self._added[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(added, removed) since the last call."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed
