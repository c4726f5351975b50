"""A scheduler, a worker that answers by script, and step tables that print themselves when they differ."""

from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from scheduler.config import SchedulerConfig
from scheduler.plan import RequestOutput, StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

STOP = 2
ORDINARY = 7


@dataclass
class ScriptedWorker:
    """Mirrors progress from plans alone. Output k of a request is `outputs[request_id][k]`, else ORDINARY."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, list[list[int]]] = field(default_factory=dict)
    """Per request, what its drafter proposes after each step that samples, in turn."""
    errors: dict[str, str] = field(default_factory=dict)
    """Reported with the next step that has the request."""
    num_prompt_tokens: dict[str, int] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in [*plan.finished_request_ids, *plan.preempted_request_ids]:
            del self.num_tokens[request_id], self.progress[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self.progress
            self.num_prompt_tokens[new.request_id] = new.num_prompt_tokens
            self.num_tokens[new.request_id] = len(new.token_ids)
            self.progress[new.request_id] = new.num_computed_tokens
        result = StepResult(plan.epoch, plan.step_id)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            drafts = plan.spec_token_ids.get(request_id, [])
            known = self.num_tokens[request_id]
            self.progress[request_id] += num_tokens
            assert self.progress[request_id] <= known + len(drafts), "computes tokens that nobody knows"
            if self.progress[request_id] >= known:
                self._sample(request_id, drafts, result)
            if request_id in self.errors:
                result.errors[request_id] = self.errors.pop(request_id)
        return result

    def _sample(self, request_id: str, drafts: list[int], result: StepResult) -> None:
        script = self.outputs.get(request_id, [])
        token_ids: list[int] = []
        for draft in [*drafts, None]:
            index = self.num_tokens[request_id] - self.num_prompt_tokens[request_id]
            token_ids.append(script[index] if index < len(script) else ORDINARY)
            self.num_tokens[request_id] += 1
            if draft != token_ids[-1]:
                break
        self.progress[request_id] = self.num_tokens[request_id] - 1
        result.sampled_token_ids[request_id] = token_ids
        if self.drafts.get(request_id):
            result.draft_token_ids[request_id] = self.drafts[request_id].pop(0)


class Rig:
    """Drives a scheduler step by step and proves it after each call."""

    def __init__(self, num_blocks: int = 64, **config: Any) -> None:
        defaults = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4}
        self.scheduler = Scheduler(SchedulerConfig(**{**defaults, **config}), num_blocks)
        self.worker = ScriptedWorker()
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.rows: list[dict[str, str]] = []
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 32, **fields: Any) -> Request:
        """A request; an int is the length of a prompt that shares no block with any other."""
        unique = 1000 * (1 + len(self.outputs))
        prompt_token_ids = list(range(unique, unique + prompt)) if isinstance(prompt, int) else prompt
        params = fields.pop("sampling_params", SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)))
        request = Request(request_id, prompt_token_ids, params, **fields)
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        self.scheduler.check_integrity()
        return request

    def plan(self) -> StepPlan | None:
        """Plan a step and let the worker execute it; its result waits."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            assert sum(plan.num_scheduled_tokens.values()) <= self.scheduler.config.max_num_batched_tokens
            self.in_flight.append((plan, self.worker.execute(plan)))
        return plan

    def take(self) -> list[RequestOutput]:
        """Hand the oldest result to the scheduler and note the step in the table."""
        plan, result = self.in_flight.popleft()
        outputs = self.scheduler.update_from_result(plan, result)
        self.scheduler.check_integrity()
        row = {request_id: str(num_tokens) for request_id, num_tokens in plan.num_scheduled_tokens.items()}
        for output in outputs:
            assert output.request_id not in self.finish_reasons, "an output after the last one"
            self.outputs[output.request_id] += output.new_token_ids
            row[output.request_id] += "+" * len(output.new_token_ids)
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason
        self.rows.append(row)
        return outputs

    def step(self) -> StepPlan:
        """One whole step at depth 1."""
        plan = self.plan()
        assert plan is not None, "nothing was scheduled"
        self.take()
        return plan

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def run_to_end(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()

    def expect(self, table: str) -> None:
        """Compare the steps so far with a table and start a new one.

        Its first line names requests; each further line is a step: the tokens scheduled, "." for none,
        a "+" for each token that came out.
        """
        lines = [line.split() for line in table.strip().splitlines()]
        names, expected = lines[0], [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
        names += sorted({name for row in self.rows for name in row} - set(names))
        actual, self.rows = self.rows, []
        nothing: dict[str, str] = {}
        pairs = list(zip_longest(actual, expected, fillvalue=nothing))
        report = ["step  " + "".join(f"{name:>14}" for name in names)]
        differs = len(actual) != len(expected)
        for index, (got, want) in enumerate(pairs):
            cells = []
            for name in names:
                was, should = got.get(name, "."), want.get(name, ".")
                differs |= was != should
                cells.append(was if was == should else f"{was} (not {should})")
            report.append(f"{index:<6}" + "".join(f"{cell:>14}" for cell in cells))
        assert not differs, "\n".join(["the steps differ from the table:", *report])
