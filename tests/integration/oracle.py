"""Greedy tokens against Hugging Face transformers in float32: the harness of test_oracle.

`RankGroup` runs one real Worker a rank in processes of their own (TP 1 runs here) and executes encoded
plans; `generate` drives the real Scheduler over it at either overlap depth; `assert_greedy` holds the
output against the reference model, teacher-forced, so that a tie in the reference is no failure.
"""

import multiprocessing as mp
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from tiny_models import reference_logits

from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from workers import wire
from workers.config import ModelLimits, WorkerConfig
from workers.worker import Worker

REPLY_SECONDS = 120.0
TIE = 1e-4
"""Two logits of the float32 reference closer than this are a tie: either token is right."""


def _rank_main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    worker: Worker | None = None
    while True:
        command, argument = pipe.recv()
        reply: Any = None
        if command == "open":
            config, rank, rendezvous = argument
            worker = Worker(config, rank, rendezvous)
            worker.load()
            reply = worker.measure()
        elif command == "stop":
            return
        else:
            assert worker is not None
            if command == "allocate":
                worker.allocate(argument)
            elif command == "step":
                reply = wire.encode(worker.execute_step(wire.decode_plan(argument)))
            elif command == "close":
                worker.shutdown()
        pipe.send(reply)


class RankGroup:
    """One Worker a rank, each in its own process; reconfigured by `open`, so that torch is loaded once."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def _receive(self, pipe: Connection) -> Any:
        if not pipe.poll(REPLY_SECONDS):
            raise TimeoutError(f"no reply from a rank within {REPLY_SECONDS:.0f} s")
        return pipe.recv()

    def _call(self, command: str, arguments: Sequence[Any]) -> list[Any]:
        for pipe, argument in zip(self.pipes, arguments, strict=True):
            pipe.send((command, argument))
        return [self._receive(pipe) for pipe in self.pipes]

    def open(self, config: WorkerConfig) -> ModelLimits:
        size = len(self.pipes)
        rendezvous = f"tcp://127.0.0.1:{_free_port()}" if size > 1 else None
        config = replace(config, tensor_parallel_size=size)
        measured = self._call("open", [(config, rank, rendezvous) for rank in range(size)])
        assert len(set(measured)) == 1, measured
        limits = measured[0]
        self._call("allocate", [limits] * size)
        return limits

    def send(self, plan: StepPlan) -> None:
        data = wire.encode(plan)
        for pipe in self.pipes:
            pipe.send(("step", data))

    def receive(self) -> StepResult:
        """The oldest result in flight, after checking that every rank has sampled the same."""
        results = [wire.decode_result(self._receive(pipe)) for pipe in self.pipes]
        for other in results[1:]:
            assert other.sampled_token_ids == results[0].sampled_token_ids, "ranks disagree"
        return results[0]

    def close(self) -> None:
        self._call("close", [None] * len(self.pipes))

    def stop(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(("stop", None))
            process.join(10)
            if process.is_alive():
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Outcome:
    tokens: dict[str, list[int]]
    cached: dict[str, int]
    scheduler: Scheduler


def generate(group: RankGroup, scheduler: Scheduler, arrivals: Sequence[tuple[int, Request]]) -> Outcome:
    """Run requests to their end; each arrives before the given call of schedule()."""
    outcome = Outcome({}, {}, scheduler)
    pending = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
    in_flight: deque[StepPlan] = deque()
    for turn in range(100_000):
        while pending and pending[0][0] <= turn:
            request = pending.popleft()[1]
            scheduler.add_request(request)
            outcome.tokens[request.request_id] = []
        while len(in_flight) < scheduler.config.overlap_depth and (plan := scheduler.schedule()) is not None:
            group.send(plan)
            in_flight.append(plan)
        if not in_flight:
            if not pending:
                assert not scheduler.has_unfinished_requests(), "requests left, but nothing to run"
                return outcome
            continue
        plan = in_flight.popleft()
        for output in scheduler.update_from_result(plan, group.receive()):
            assert output.error is None, output.error
            outcome.tokens[output.request_id] += output.new_token_ids
            outcome.cached[output.request_id] = output.num_cached_tokens
        scheduler.check_integrity()
    raise AssertionError("the requests did not end")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def build_scheduler(limits: ModelLimits, budget: int, depth: int, max_num_seqs: int) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        block_size=limits.block_size,
        overlap_depth=depth,
    )
    return Scheduler(config, limits.num_blocks)


def assert_greedy(model_path: str, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each output token is the reference's best for the tokens before it, or within TIE of the best."""
    rows = reference_logits(model_path, [*prompt, *output])[len(prompt) - 1 : len(prompt) - 1 + len(output)]
    best = rows.max(dim=-1)
    chosen = rows[torch.arange(len(output)), torch.tensor(list(output))]
    lost = best.values - chosen
    wrong = (lost > TIE).nonzero().flatten().tolist()
    assert not wrong, (
        f"output {list(output)} differs from the reference at {wrong}: "
        f"expected {best.indices[wrong].tolist()}, logits lower by {lost[wrong].tolist()}"
    )
