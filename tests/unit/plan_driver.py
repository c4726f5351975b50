"""Hand-made plans for one or several workers: a queue of requests, blocks to spare, and a chunk size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.plan import NewRequest, PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits


@dataclass
class Driven:
    """What came back for a request."""

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class PlanDriver:
    """Schedules every request every step, at most `chunk` tokens each, until each has max_tokens of output."""

    def __init__(self, execute: Callable[[StepPlan], StepResult], limits: ModelLimits, chunk: int) -> None:
        self.execute = execute
        self.block_size = limits.block_size
        self.free_blocks = list(range(limits.num_blocks))[::-1]
        self.chunk = chunk
        self.step_id = 0
        self.held: dict[str, Driven] = {}
        self.finished: list[str] = []
        self.preempted: list[str] = []

    def run(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        preempt_every: int = 0,
        drafts_for: Callable[[Driven], list[int]] = lambda request: [],
    ) -> list[Driven]:
        """The requests' outputs. `preempt_every`: steps between preemptions of the oldest request; 0: none."""
        driven = [
            Driven(f"r{self.step_id}-{index}", list(prompt), len(prompt), params)
            for index, (prompt, params) in enumerate(requests)
        ]
        open_requests = list(driven)
        while open_requests:
            assert self.step_id < 500, "preempted more often than a request needs to get on"
            if preempt_every and self.step_id % preempt_every == preempt_every - 1 and self.held:
                self.preempt(next(iter(self.held.values())))
            self.step(open_requests, drafts_for)
            for request in [r for r in open_requests if len(r.output) >= r.params.max_tokens]:
                open_requests.remove(request)
                self.leave(request)
                self.finished.append(request.request_id)
        return driven

    def step(self, requests: Sequence[Driven], drafts_for: Callable[[Driven], list[int]]) -> StepResult:
        plan = StepPlan(
            0,
            self.step_id,
            {},
            finished_request_ids=self.finished,
            preempted_request_ids=self.preempted,
        )
        self.finished, self.preempted = [], []
        for request in requests:
            self.schedule(request, plan, drafts_for)
        self.step_id += 1
        result = self.execute(plan)
        assert not result.errors
        for request in requests:
            self.apply(request, plan, result)
        return result

    def schedule(self, request: Driven, plan: StepPlan, drafts_for: Callable[[Driven], list[int]]) -> None:
        count = min(self.chunk, len(request.tokens) - request.computed)
        drafts = drafts_for(request) if request.computed + count == len(request.tokens) else []
        count += len(drafts)
        num_blocks = -(-(request.computed + count) // self.block_size) - len(request.blocks)
        added = [self.free_blocks.pop() for _ in range(num_blocks)]
        request.blocks += added
        plan.num_scheduled_tokens[request.request_id] = count
        if drafts:
            plan.spec_token_ids[request.request_id] = drafts
        if request.request_id in self.held:
            if added:
                plan.new_block_ids[request.request_id] = added
        else:
            self.held[request.request_id] = request
            new = NewRequest(
                request.request_id,
                list(request.tokens),
                request.num_prompt,
                request.params,
                list(request.blocks),
                request.computed,
            )
            plan.new_requests.append(new)

    def apply(self, request: Driven, plan: StepPlan, result: StepResult) -> None:
        sampled = result.sampled_token_ids.get(request.request_id, [])
        rejected = len(plan.spec_token_ids.get(request.request_id, [])) + 1 - len(sampled) if sampled else 0
        request.computed += plan.num_scheduled_tokens[request.request_id] - rejected
        request.tokens += sampled
        request.logprobs += result.logprobs.get(request.request_id, [])
        if request.request_id in result.prompt_logprobs:
            request.prompt_logprobs.append(result.prompt_logprobs[request.request_id])

    def preempt(self, request: Driven) -> None:
        self.leave(request)
        self.preempted.append(request.request_id)
        request.computed = 0

    def leave(self, request: Driven) -> None:
        del self.held[request.request_id]
        self.free_blocks += request.blocks[::-1]
        request.blocks = []
