"""What one engine tells of its load. Standard library only, for engines and Serve's controller alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One engine, as of now or as a mean over a few seconds. All values are 0 for one that has nothing to do."""

    queue_seconds: float
    """What a request that comes now would wait for its first token: until the prompts before it are computed, or until
    a seat is free where that takes longer. A recovery counts for nothing: it ends by itself.
    """
    prefill_share: float
    """Share of the time that it spends in steps with prompts in them, 0 to 1."""
    kv_usage: float
    """Share of its KV blocks that requests hold, 0 to 1; blocks that only the prefix cache holds are free."""
