"""Times vLLM's own scheduler, alone. Runs in the peer's environment and knows nothing of this project.

    python vllm_scheduler.py MODEL_DIR

For each line {"num_decodes": N, "num_steps": S, "prompt_tokens": P} on its input it writes a line with the median
milliseconds of schedule(), of update_from_output() and of both, over S steps with N requests that have computed
their prompts of P tokens.
"""

import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def decoding_scheduler(model: str, num_decodes: int, num_steps: int, prompt_tokens: int) -> Scheduler:
    """Built as its engine builds it, with the prefix cache on and its statistics off; all prompts are computed."""
    max_model_len = prompt_tokens + num_steps + 8
    budget = max(num_decodes * prompt_tokens, max_model_len)
    config = EngineArgs(
        model=model,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=num_decodes,
        max_num_batched_tokens=budget,
        async_scheduling=False,
    ).create_engine_config()
    block_size = config.cache_config.block_size
    num_blocks = num_decodes * (max_model_len // block_size + 2)
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(block_size, hash_function)
    for index in range(num_decodes):
        params = SamplingParams(temperature=0.0, max_tokens=max_model_len)
        params.update_from_generation_config({}, 0)
        prompt = [index + 2] * prompt_tokens
        scheduler.add_request(Request(f"request-{index:08}", prompt, params, None, block_hasher=hasher))
    step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[int, float, float]:
    """Requests in the step, seconds of schedule() and of update_from_output()."""
    started = time.perf_counter()
    planned = scheduler.schedule()
    scheduled = time.perf_counter()
    request_ids = list(planned.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[7] for _ in request_ids],
    )
    received = time.perf_counter()
    scheduler.update_from_output(planned, output)
    return len(request_ids), scheduled - started, time.perf_counter() - received


def measure(model: str, num_decodes: int, num_steps: int, prompt_tokens: int) -> dict[str, Any]:
    scheduler = decoding_scheduler(model, num_decodes, num_steps, prompt_tokens)
    gc.collect()
    gc.freeze()  # as its engine does after start-up
    times = []
    for _ in range(num_steps):
        planned, *seconds = step(scheduler)
        assert planned == num_decodes
        times.append(seconds)
    gc.unfreeze()
    schedule_ms, update_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return {"schedule_ms": schedule_ms, "update_ms": update_ms, "total_ms": 1e3 * statistics.median(map(sum, times))}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(measure(sys.argv[1], **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
