"""Engines over real executors and a tiny model, and what to expect of them."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import cache

from tiny_models import reference_greedy, tiny_model

from cluster.engine.engine import Engine
from cluster.engine.executor import Executor
from cluster.engine.settings import EngineDeadlines, EngineSettings, SchedulerOptions
from scheduler.plan import RequestOutput
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from workers.config import WorkerConfig

DEADLINE = 60.0
NUM_TOKENS = 12
PROMPTS = [[5, 9, 17], list(range(10, 60)), [200, 100] * 11, [3]]


def settings(tensor_parallel_size: int = 1, model_path: str | None = None) -> EngineSettings:
    """Chunks of 16 tokens, two plans in flight, no metrics."""
    worker = WorkerConfig(
        model_path=model_path or tiny_model("llama"),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        dtype="float32",
        device="cpu",
        tensor_parallel_size=tensor_parallel_size,
        num_blocks=64,
        num_threads=1,
    )
    return EngineSettings(
        worker,
        SchedulerOptions(overlap_depth=2),
        EngineDeadlines(place=60, load=60, measure=60, allocate=60, link=30, step=30, shutdown=20, orphan=5),
        app_name="",
    )


@cache
def expected_tokens() -> list[list[int]]:
    """Greedy continuations by the reference. Fails where its two best logits are too close to tell."""
    tokens = []
    for prompt in PROMPTS:
        continuation, lead = reference_greedy(tiny_model("llama"), prompt, NUM_TOKENS)
        assert lead > 1e-3
        tokens.append(continuation)
    return tokens


async def generate(executor: Executor, engine_settings: EngineSettings) -> list[list[int]]:
    """Start, run PROMPTS together, and shut down."""
    outputs: list[RequestOutput] = []
    ended = asyncio.Event()

    def publish(new: Sequence[RequestOutput]) -> None:
        outputs.extend(new)
        if sum(output.finish_reason is not None for output in outputs) == len(PROMPTS):
            ended.set()

    engine = Engine(
        executor,
        lambda limits: Scheduler(engine_settings.scheduler_config(limits), limits.num_blocks),
        publish,
        engine_settings.scheduler.overlap_depth,
    )
    await engine.start()
    loop = asyncio.ensure_future(engine.run())
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(index), prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)))
    await asyncio.wait_for(ended.wait(), DEADLINE)
    await engine.shutdown()
    await asyncio.wait_for(loop, DEADLINE)
    return [
        [token_id for output in outputs if output.request_id == str(index) for token_id in output.new_token_ids]
        for index in range(len(PROMPTS))
    ]


def is_alive(process_id: int) -> bool:
    """Zombies, which only wait for their parent to look, count as dead."""
    try:
        with open(f"/proc/{process_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds; fail after the deadline, naming what was waited for."""
    give_up_at = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {DEADLINE:g} s for {what}"
        await asyncio.sleep(0.02)


async def all_gone(process_ids: Sequence[int]) -> None:
    """Until no such process lives."""
    assert process_ids
    assert os.getpid() not in process_ids
    await until(lambda: not any(map(is_alive, process_ids)), f"the end of processes {process_ids}")
