"""Random workloads for a scheduler, and the loop that drives one through them.

A workload is data (settings, then a list of operations), drawn through one function `pick(low, high)`, so that
hypothesis can draw and shrink it and a plain seed can too.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from simulated_worker import SimulatedWorker, expected_output

from scheduler.config import SchedulerConfig
from scheduler.plan import RequestOutput, StepPlan, StepResult
from scheduler.sampling_params import SamplingParams

Pick = Callable[[int, int], int]
Operation = tuple[str, int]


@dataclass(frozen=True)
class RequestSpec:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int
    priority: int
    lora_id: str | None
    cache_salt: str | None
    has_grammar: bool
    error_at: int | None
    """Output position whose logits are NaN; -1: the first chunk; None: no fault."""
    output: list[int] = field(default_factory=list)
    """Delivered before, by another scheduler; empty: a new request."""


@dataclass(frozen=True)
class Workload:
    config: SchedulerConfig
    num_blocks: int
    draft_accuracy: float | None
    seed: int
    specs: list[RequestSpec]
    operations: list[Operation]
    """("add" | "abort" | "stop" | "ready", request index), ("schedule" | "deliver" | "epoch", 0).

    ("hold", n): the requests whose index is in the bits of n; none for 0.
    """


class Engine(Protocol):
    """What the loop needs of a scheduler, the real one or the reference."""

    def add(self, spec: RequestSpec) -> bool: ...
    def finish(self, request_id: str, aborted: bool) -> None: ...
    def mark_grammar_ready(self, request_id: str) -> None: ...
    def hold(self, request_ids: set[str]) -> None: ...
    def end_epoch(self) -> None: ...
    def schedule(self) -> StepPlan | None: ...
    def update_from_result(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...


def seeded(seed: int) -> Pick:
    return random.Random(seed).randint


def one_of(pick: Pick, *choices: int) -> int:
    return choices[pick(0, len(choices) - 1)]


def make_config(pick: Pick, overlap_depth: int | None = None, scale: int = 1) -> SchedulerConfig:
    max_model_len = pick(6, 48)
    max_num_seqs = pick(1, 6 * scale)
    chunked = pick(0, 5) > 0
    smallest = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=smallest + one_of(pick, 0, 1, 3, 6, 12, 30),
        max_num_seqs=max_num_seqs,
        block_size=one_of(pick, 4, 2, 1, 8),
        long_prefill_token_threshold=one_of(pick, 0, 2, 3, 5, 9),
        max_num_partial_prefills=pick(1, 3),
        max_long_partial_prefills=pick(1, 2),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=pick(0, 4) > 0,
        policy="priority" if pick(0, 1) else "fcfs",
        overlap_depth=overlap_depth or pick(1, 2),
        uses_drafter=pick(0, 3) == 3,
    )


def make_spec(pick: Pick, index: int, config: SchedulerConfig, faults: bool) -> RequestSpec:
    longest = config.max_model_len - 1
    if faults and pick(0, 30) == 30:
        longest = config.max_model_len + 2  # may be refused
    length = pick(1, longest if pick(0, 2) else 1 + longest // 4)
    shared = pick(0, length) if pick(0, 2) else length
    family = pick(0, 1)
    prompt = [100 + 50 * family + i for i in range(shared)] + [1000 + 100 * index + i for i in range(length - shared)]
    max_tokens = pick(1, 12) if pick(0, 1) else config.max_model_len
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, one_of(pick, 0, 0, 2, 5)),
        stop_token_ids=tuple(range(one_of(pick, 0, 1, 2))),
        num_prompt_logprobs=0 if pick(0, 9) == 9 else None,
    )
    error_at = pick(-1, 4) if faults and pick(0, 9) == 9 else None
    output: list[int] = []
    if pick(0, 5) == 5 and error_at is None and length < config.max_model_len:
        whole, _ = expected_output(prompt, params, config.max_model_len)
        output = whole[: pick(0, len(whole) - 1)]
    return RequestSpec(
        request_id=f"r{index}",
        prompt=prompt,
        params=params,
        # Under fcfs requests are added as they arrive; under priority a late one may have arrived before.
        arrival=100 * pick(0, 9) + index if config.policy == "priority" else index,
        priority=pick(0, 3) if config.policy == "priority" else 0,
        lora_id=[None, None, None, "a"][pick(0, 3)],
        cache_salt=[None, None, None, "s"][pick(0, 3)],
        has_grammar=pick(0, 4) == 4,
        error_at=error_at,
        output=output,
    )


def make_workload(pick: Pick, faults: bool = True, overlap_depth: int | None = None, scale: int = 1) -> Workload:
    """`faults`: with aborts, errors, refusals and epochs that end; without, every request runs to its own end.

    `scale` multiplies the numbers of requests, seats and operations.
    """
    config = make_config(pick, overlap_depth, scale)
    least = -(-config.max_model_len // config.block_size)
    num_blocks = least + one_of(pick, 0, 1, 2, 4, least, 2 * least)
    specs = [make_spec(pick, index, config, faults) for index in range(pick(1, 12 * scale))]
    operations: list[Operation] = []
    added = 0
    for _ in range(pick(5, 70 * scale)):
        kind = pick(0, 41)
        if kind <= 13:
            operations.append(("schedule", 0))
        elif kind <= 25:
            operations.append(("deliver", 0))
        elif kind <= 33 and added < len(specs):
            operations.append(("add", added))
            added += 1
        elif kind <= 36 and added:
            operations.append(("ready", pick(0, added - 1)))
        elif kind <= 38 and added and faults:
            operations.append((("abort", "stop")[pick(0, 1)], pick(0, added - 1)))
        elif kind >= 40:
            operations.append(("hold", pick(0, 2**added - 1) if pick(0, 2) else 0))
        elif kind == 39 and faults and pick(0, 3) == 3:
            operations.append(("epoch", 0))
    operations += [("add", index) for index in range(added, len(specs))]
    draft_accuracy = one_of(pick, 5, 9, 1) / 10 if config.uses_drafter else None
    return Workload(config, num_blocks, draft_accuracy, pick(0, 1000), specs, operations)


@dataclass
class Flight:
    plan: StepPlan
    result: StepResult


@dataclass
class Loop:
    """The engine's loop in small. Subclasses look in after every event."""

    workload: Workload
    engine: Engine
    in_flight: deque[Flight] = field(default_factory=deque)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    num_cached: dict[str, int] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    ended_by_caller: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        load = self.workload
        self.worker = SimulatedWorker(
            load.config.block_size,
            load.num_blocks,
            {s.request_id: s.cache_salt for s in load.specs},
            {s.request_id: s.error_at for s in load.specs if s.error_at is not None},
            load.draft_accuracy,
            load.seed,
        )

    def run(self) -> None:
        for kind, index in self.workload.operations:
            self.perform(kind, index)
        self.hold(set())
        for spec in self.workload.specs:
            self.ready(spec.request_id)
        self.drain()

    def perform(self, kind: str, index: int) -> None:
        if kind == "hold":
            self.hold({spec.request_id for bit, spec in enumerate(self.workload.specs) if index >> bit & 1})
            return
        spec = self.workload.specs[index]
        if kind == "add":
            self.add(spec)
        elif kind == "ready":
            self.ready(spec.request_id)
        elif kind in ("abort", "stop"):
            self.finish(spec.request_id, kind == "abort")
        elif kind == "epoch":
            self.end_epoch()
        elif kind == "schedule" and len(self.in_flight) < self.workload.config.overlap_depth:
            self.schedule()
        elif self.in_flight:
            self.deliver()

    def drain(self) -> None:
        """Plans and delivers until nothing is left; no request may take for ever."""
        idle = steps = 0
        while self.engine.has_unfinished_requests() or self.in_flight:
            planned = len(self.in_flight) < self.workload.config.overlap_depth and self.schedule()
            if not planned and self.in_flight:
                self.deliver()
                planned = True
            # A step may do nothing but preempt; a second in a row with nothing in flight would never change.
            idle = 0 if planned else idle + 1
            steps += 1
            assert idle < 3, "no plan, nothing in flight, and requests unfinished"
            assert steps < 5000, "requests never end"

    def add(self, spec: RequestSpec) -> None:
        if not self.engine.add(spec):
            self.refused.add(spec.request_id)

    def ready(self, request_id: str) -> None:
        self.engine.mark_grammar_ready(request_id)

    def finish(self, request_id: str, aborted: bool) -> None:
        if request_id not in self.reasons:
            self.ended_by_caller.add(request_id)
        self.engine.finish(request_id, aborted)

    def hold(self, request_ids: set[str]) -> None:
        self.engine.hold(request_ids)

    def end_epoch(self) -> None:
        stale = list(self.in_flight)
        self.engine.end_epoch()
        self.worker.restart()
        self.in_flight.clear()
        for flight in stale:
            assert self.engine.update_from_result(flight.plan, flight.result) == []

    def schedule(self) -> bool:
        plan = self.engine.schedule()
        if plan is None:
            return False
        self.in_flight.append(Flight(plan, self.worker.execute(plan)))
        return True

    def deliver(self) -> list[RequestOutput]:
        flight = self.in_flight.popleft()
        outputs = self.engine.update_from_result(flight.plan, flight.result)
        for output in outputs:
            self.collect(output)
        return outputs

    def collect(self, output: RequestOutput) -> None:
        request_id = output.request_id
        assert request_id not in self.reasons, f"{request_id} has an output after its last"
        assert request_id not in self.ended_by_caller
        self.outputs.setdefault(request_id, []).extend(output.new_token_ids)
        if self.num_cached.setdefault(request_id, output.num_cached_tokens) != output.num_cached_tokens:
            raise AssertionError(f"num_cached_tokens of {request_id} changed")
        if output.finish_reason is not None:
            self.reasons[request_id] = output.finish_reason
        if output.finish_reason == "error" and request_id in self.worker.requests:
            self.worker.withdrawn |= set(self.worker.requests[request_id].blocks)
