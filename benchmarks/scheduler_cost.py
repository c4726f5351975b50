"""What a step costs in the scheduler alone: N decodes, schedule() plus update_from_result(), one core.

    python -m benchmarks.scheduler_cost

Prints medians in milliseconds, and the total over what linear growth from the smallest N would give.
Exits with 1 if 256 decodes take more than 1 ms at the median.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence

from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

SIZES = (16, 64, 256, 1024)
NUM_STEPS = 500
PROMPT_TOKENS = 64
CHECKED_SIZE = 256
LIMIT_MS = 1.0


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
    """Exit code 1 when the target is missed."""
    argparse.ArgumentParser(
        prog="scheduler_cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args(argv)
    print(f"{'N':>6}{'schedule ms':>14}{'update ms':>12}{'total ms':>11}{'vs linear':>11}")
    totals: dict[int, float] = {}
    for size in SIZES:
        schedule_ms, update_ms, totals[size] = measure(size)
        linear = totals[SIZES[0]] * size / SIZES[0]
        print(f"{size:>6}{schedule_ms:>14.3f}{update_ms:>12.3f}{totals[size]:>11.3f}{totals[size] / linear:>10.2f}x")
    if totals[CHECKED_SIZE] > LIMIT_MS:
        print(f"{CHECKED_SIZE} decodes take {totals[CHECKED_SIZE]:.3f} ms, above {LIMIT_MS} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
