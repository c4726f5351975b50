"""What a step costs in the scheduler alone: N decodes, schedule() plus update_from_result(), one core.

    python -m benchmarks scheduler_cost [--vllm]

Prints medians in milliseconds over all rounds, and the total over what linear growth from the smallest N would give.
With --vllm ours takes turns with vLLM's own scheduler, in an environment that is made on first use; the ratio is the
median over rounds, because a machine's speed changes from one second to the next.
Exits with 1 if 256 decodes take more than 0.8 ms at the median, or a quarter of vLLM's time, or if
1,024 take over 1.25 times what linear growth from 16 gives.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.counts import positive
from benchmarks.peers.scheduler_process import VllmScheduler, running_vllm_scheduler
from benchmarks.summary import spread_of, table
from cluster.models.store import open_store
from cluster.settings.tree import DEFAULT_MODEL
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

SIZES = (16, 64, 256, 1024)
NUM_STEPS = 500
PROMPT_TOKENS = 64
CHECKED_SIZE = 256
LIMIT_MS = 0.8
LIMIT_OF_VLLM = 0.25
LIMIT_OF_LINEAR = 1.25


def decoding_scheduler(num_decodes: int) -> Scheduler:
    """A scheduler whose requests have all computed their prompts."""
    max_model_len = PROMPT_TOKENS + NUM_STEPS + 8
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=num_decodes * PROMPT_TOKENS,
        max_num_seqs=num_decodes,
    )
    scheduler = Scheduler(config, num_blocks=num_decodes * (max_model_len // config.block_size + 2))
    params = SamplingParams(max_tokens=max_model_len, stop_token_ids=(0, 1))
    for index in range(num_decodes):
        prompt = [index + 2] * PROMPT_TOKENS
        scheduler.add_request(Request(f"request-{index:08}", prompt, params))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update_from_result(plan, result_of(plan))
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    """One sampled token for every request of the plan."""
    return StepResult(plan.epoch, plan.step_id, {request_id: [7] for request_id in plan.num_scheduled_tokens})


def measure(num_decodes: int) -> tuple[float, float, float]:
    """Median milliseconds of schedule(), of update_from_result(), and of both."""
    scheduler = decoding_scheduler(num_decodes)
    gc.collect()
    gc.freeze()  # as the engine does after start-up
    times = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        assert len(plan.num_scheduled_tokens) == num_decodes
        result = result_of(plan)
        received = time.perf_counter()
        scheduler.update_from_result(plan, result)
        times.append((scheduled - started, time.perf_counter() - received))
    gc.unfreeze()
    schedule_ms, update_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return schedule_ms, update_ms, 1e3 * statistics.median(map(sum, times))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(
        prog="scheduler_cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--vllm", action="store_true", help="time vLLM's scheduler beside ours")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose configuration vLLM's scheduler is built for")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        peer = stack.enter_context(running_vllm_scheduler(_directory(args.model))) if args.vllm else None
        rounds = [_measure_all(peer) for _ in range(args.rounds)]
    print(_table(rounds))
    checks = checks_of(rounds)
    print("\n".join(["", *(f"{'ok  ' if good else 'MISS'}  {text}" for text, good in checks)]))
    return int(not all(good for _, good in checks))


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds of schedule(), of the update and of both, by size; of vLLM's scheduler too if that was asked for."""

    ours: Mapping[int, tuple[float, float, float]]
    vllms: Mapping[int, tuple[float, float, float]]

    def ratio(self, size: int) -> float:
        """Ours / vLLM's."""
        return self.ours[size][2] / self.vllms[size][2]


def _measure_all(peer: VllmScheduler | None) -> Round:
    ours, vllms = {}, {}
    for size in SIZES:
        ours[size] = measure(size)
        if peer is not None:
            vllms[size] = peer.measure(size, NUM_STEPS, PROMPT_TOKENS)
    return Round(ours, vllms)


def _median(rounds: Sequence[Round], size: int, column: int = 2) -> float:
    return statistics.median(found.ours[size][column] for found in rounds)


def _table(rounds: Sequence[Round]) -> str:
    with_vllm = bool(rounds[0].vllms)
    header = ["N", "schedule ms", "update ms", "total ms", "vs linear"]
    rows: list[list[object]] = []
    for size in SIZES:
        linear = _median(rounds, SIZES[0]) * size / SIZES[0]
        times = [f"{_median(rounds, size, column):.3f}" for column in range(3)]
        row: list[object] = [size, *times, f"{_median(rounds, size) / linear:.2f}x"]
        if with_vllm:
            row += [
                f"{statistics.median(found.vllms[size][2] for found in rounds):.3f}",
                spread_of([round(found.ratio(size), 3) for found in rounds]),
            ]
        rows.append(row)
    return table([*header, "vLLM total ms", "ours / vLLM's"] if with_vllm else header, rows)


def checks_of(rounds: Sequence[Round]) -> list[tuple[str, bool]]:
    """The targets that these rounds can tell about, and whether they are met."""
    checked = _median(rounds, CHECKED_SIZE)
    growth = _median(rounds, SIZES[-1]) / _median(rounds, SIZES[0]) / (SIZES[-1] / SIZES[0])
    checks = [
        (f"{CHECKED_SIZE} decodes: {checked:.3f} ms (target: at most {LIMIT_MS:g})", checked <= LIMIT_MS),
        (
            f"growth from {SIZES[0]} to {SIZES[-1]}: {growth:.2f} times linear (target: at most {LIMIT_OF_LINEAR:g})",
            growth <= LIMIT_OF_LINEAR,
        ),
    ]
    if rounds[0].vllms:
        ratio = statistics.median(found.ratio(CHECKED_SIZE) for found in rounds)
        text = f"{CHECKED_SIZE} decodes: {ratio:.2f} of vLLM's time (target: at most {LIMIT_OF_VLLM:g})"
        checks.append((text, ratio <= LIMIT_OF_VLLM))
    return checks


def _directory(model: str) -> Path:
    return open_store(lambda text: print(text, file=sys.stderr)).resolve(model).directory


if __name__ == "__main__":
    sys.exit(main())
