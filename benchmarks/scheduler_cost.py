"""What a step costs in the scheduler alone: N decodes, schedule() plus update_from_result(), one core.

    python -m benchmarks.scheduler_cost [--vllm]

Prints medians in milliseconds, and the total over what linear growth from the smallest N would give.
With --vllm each N is followed by vLLM's own scheduler, in an environment that is made on first use.
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
from pathlib import Path

from benchmarks.peers.scheduler_process import VllmScheduler, running_vllm_scheduler
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
    parser.add_argument("--vllm", action="store_true", help="time vLLM's scheduler beside ours")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose configuration vLLM's scheduler is built for")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        peer = stack.enter_context(running_vllm_scheduler(_directory(args.model))) if args.vllm else None
        ours, vllms = _measure_all(peer)
    checks = checks_of(ours, vllms)
    print("\n".join(["", *(f"{'ok  ' if good else 'MISS'}  {text}" for text, good in checks)]))
    return int(not all(good for _, good in checks))


def _measure_all(peer: VllmScheduler | None) -> tuple[dict[int, float], dict[int, float]]:
    """Total milliseconds by size, of ours and of vLLM's; prints each line when it is known."""
    line = f"{'N':>6}{'schedule ms':>14}{'update ms':>12}{'total ms':>11}{'vs linear':>11}"
    print(line + ("" if peer is None else f"{'vLLM schedule':>16}{'update':>9}{'total':>9}{'ours / vLLM':>14}"))
    ours: dict[int, float] = {}
    vllms: dict[int, float] = {}
    for size in SIZES:
        schedule_ms, update_ms, ours[size] = measure(size)
        linear = ours[SIZES[0]] * size / SIZES[0]
        line = f"{size:>6}{schedule_ms:>14.3f}{update_ms:>12.3f}{ours[size]:>11.3f}{ours[size] / linear:>10.2f}x"
        if peer is not None:
            schedule_ms, update_ms, vllms[size] = peer.measure(size, NUM_STEPS, PROMPT_TOKENS)
            line += f"{schedule_ms:>16.3f}{update_ms:>9.3f}{vllms[size]:>9.3f}{ours[size] / vllms[size]:>13.2f}x"
        print(line, flush=True)
    return ours, vllms


def checks_of(ours: Mapping[int, float], vllms: Mapping[int, float]) -> list[tuple[str, bool]]:
    """The targets that these total milliseconds by size can tell about, and whether they are met."""
    checked = ours[CHECKED_SIZE]
    growth = ours[SIZES[-1]] / ours[SIZES[0]] / (SIZES[-1] / SIZES[0])
    checks = [
        (f"{CHECKED_SIZE} decodes: {checked:.3f} ms (target: at most {LIMIT_MS:g})", checked <= LIMIT_MS),
        (
            f"growth from {SIZES[0]} to {SIZES[-1]}: {growth:.2f} times linear (target: at most {LIMIT_OF_LINEAR:g})",
            growth <= LIMIT_OF_LINEAR,
        ),
    ]
    if vllms:
        ratio = checked / vllms[CHECKED_SIZE]
        text = f"{CHECKED_SIZE} decodes: {ratio:.2f} of vLLM's time (target: at most {LIMIT_OF_VLLM:g})"
        checks.append((text, ratio <= LIMIT_OF_VLLM))
    return checks


def _directory(model: str) -> Path:
    return open_store(lambda text: print(text, file=sys.stderr)).resolve(model).directory


if __name__ == "__main__":
    sys.exit(main())
