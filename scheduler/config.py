"""Settings of the scheduler, checked when built and never written afterwards."""

from dataclasses import dataclass
from typing import Literal

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of one scheduler. Raises ValueError naming the values that contradict."""

    max_model_len: int
    """Most tokens of a sequence, prompt and output together."""
    max_num_batched_tokens: int
    """Hard limit of a step's budget, in tokens."""
    max_num_seqs: int
    """Most running requests."""
    block_size: int = 16
    """Tokens a KV block holds."""
    long_prefill_token_threshold: int = 0
    """Most tokens a step computes of one chunk; 0 is off."""
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    enable_chunked_prefill: bool = True
    """False: a prompt is scheduled whole or not at all (the comparison baseline)."""
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = "fcfs"
    overlap_depth: int = 1
    """Most plans in flight: 1, or 2 to plan a step while the one before it runs."""
    uses_drafter: bool = False
    """A drafter in the worker proposes tokens: every request's next step depends on its last token."""

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "block_size",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}; it must be at least 0"
            )
        if self.overlap_depth not in (1, 2):
            raise ValueError(f"overlap_depth is {self.overlap_depth}; it must be 1 or 2")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy is {self.policy!r}; it must be 'fcfs' or 'priority'")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs"
                f" ({self.max_num_seqs}): every running request needs a token of each step's budget"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_model_len"
                f" ({self.max_model_len}) with chunked prefill off: a prompt must fit one step whole"
            )
        if self.max_num_partial_prefills > 1 and self.long_prefill_token_threshold == 0:
            object.__setattr__(self, "long_prefill_token_threshold", int(self.max_model_len * 0.04))
