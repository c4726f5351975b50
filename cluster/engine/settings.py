"""What one engine replica is built from. Knows neither Ray nor torch, so that a launcher may import it."""

from dataclasses import dataclass, field
from typing import Literal

from scheduler.config import SchedulerConfig, SchedulingPolicy
from workers.config import ModelLimits, WorkerConfig

Placement = Literal["pack", "spread"]
"""pack: an engine and its ranks on one node. spread: on several where one has no room."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The part of `SchedulerConfig` that is chosen; the rest is measured at start-up."""

    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = "fcfs"
    overlap_depth: int = 2


@dataclass(frozen=True, slots=True)
class EngineDeadlines:
    """How long an engine waits for what, in seconds. Every wait has one."""

    place: float = 120.0
    """Placement group and worker processes."""
    load: float = 1800.0
    """Weights, on the slowest rank."""
    measure: float = 300.0
    """Free memory; and again as long for a profile of a few steps."""
    allocate: float = 120.0
    link: float = 30.0
    """All ranks dial back and show the token."""
    step: float = 60.0
    """At least, for a step of a shape that no step had before: it may compile. Counts once no step is before it."""
    step_floor: float = 5.0
    """Any other step gets this and a small multiple of what steps like it take."""
    heartbeat: float = 5.0
    """A rank that is not heard of for so long has hung: each speaks once a second."""
    bundles: float = 30.0
    """Patience of a restart's phase: each has this and five times what it took at first, at most its own deadline.
    Ranks that are not placed by then have no room, and the engine gives up: a node that died may not come back."""
    recovery: float = 120.0
    """From a lost rank until all are back, attempts included; three times the first start where that is longer."""
    hand_over: float = 10.0
    """A recovery that takes longer, and twice the first start, may never end: open requests are given back to their
    front ends, which find them another engine, or this one once it is back."""
    stall: float = 30.0
    """Work waits, and the scheduler gives no plan."""
    shutdown: float = 10.0
    """From the order to stop until no worker process is left."""
    orphan: float = 10.0
    """A front end that cannot be reached for this long has its requests aborted."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine replica and its ranks; equal for every replica of a deployment."""

    worker: WorkerConfig
    """`max_num_seqs` and `max_num_batched_tokens` hold for the scheduler too."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    deadlines: EngineDeadlines = field(default_factory=EngineDeadlines)
    app_name: str = "chunkserve"
    """Whose metrics actor the engine reports to; empty: it reports to none."""
    model_name: str = "model"
    """The name the model is served under."""
    engine_cpus: float = 1.0
    """Ray CPUs of the engine process (bundle 0 of its placement group)."""
    rank_cpus: float = 1.0
    """Ray CPUs of each rank (one bundle a rank)."""
    rank_gpus: float = 0.0
    placement: Placement = "pack"
    warm_spares: bool = True
    """A second process a rank without a GPU, with its modules imported, takes over when the rank is lost."""
    max_queue_seconds: float | None = None
    """New requests are refused while the first token of one more is predicted to take longer; None: never."""
    step_log_size: int = 4096
    """Steps that the live step log keeps."""

    @property
    def strategy(self) -> str:
        """Ray's word for the placement. Both fill a node before they take the next one."""
        return "STRICT_PACK" if self.placement == "pack" else "PACK"

    def placement_bundles(self) -> list[dict[str, float]]:
        """Bundle 0 for the engine, then one bundle a rank."""
        return [{"CPU": self.engine_cpus}] + [self.rank_bundle() for _ in range(self.worker.tensor_parallel_size)]

    def rank_bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.rank_cpus}
        if self.rank_gpus:
            bundle["GPU"] = self.rank_gpus
        return bundle

    def scheduler_config(self, limits: ModelLimits) -> SchedulerConfig:
        """The chosen options with the limits start-up measured. Raises ValueError naming what contradicts."""
        options = self.scheduler
        return SchedulerConfig(
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=self.worker.max_num_batched_tokens,
            max_num_seqs=self.worker.max_num_seqs,
            block_size=limits.block_size,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            max_num_partial_prefills=options.max_num_partial_prefills,
            max_long_partial_prefills=options.max_long_partial_prefills,
            enable_chunked_prefill=options.enable_chunked_prefill,
            enable_prefix_caching=options.enable_prefix_caching,
            policy=options.policy,
            overlap_depth=options.overlap_depth,
        )
