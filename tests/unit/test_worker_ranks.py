"""Groups of two and three worker processes over Gloo: the same tokens on every rank, and those of one rank."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, reference_greedy, tiny_model
from tp_ranks import free_rendezvous
from worker_rank import RankReport, load_rank, run_rank

from scheduler.sampling_params import SamplingParams
from workers.config import WorkerConfig
from workers.worker import Worker

SECONDS = 120


def on_ranks(size: int, function: Callable[..., Any], config: WorkerConfig, *args: Any) -> list[Any]:
    rendezvous = free_rendezvous()
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(function, config, rank, rendezvous, *args) for rank in range(size)]
        return [future.result(timeout=SECONDS) for future in futures]


def config_for(kind: str, size: int) -> WorkerConfig:
    return WorkerConfig(
        model_path=tiny_model(kind),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        dtype="float32",
        device="cpu",
        tensor_parallel_size=size,
        block_size=4,
        kv_memory_bytes=400_000,
        num_threads=1,
        rendezvous_seconds=60,
    )


def requests() -> list[tuple[list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (19, 7, 30, 1)]
    params = [
        SamplingParams(max_tokens=8, temperature=0.0),
        SamplingParams(max_tokens=8, temperature=1.0, seed=8, num_logprobs=2),
        SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=9, repetition_penalty=1.1),
        SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=1, min_tokens=4, stop_token_ids=(5,)),
    ]
    return list(zip(prompts, params, strict=True))


@pytest.mark.parametrize(("kind", "size"), [("smollm2", 2), ("llama", 3), ("mistral", 2)])
def test_every_rank_gives_the_tokens_of_one_rank(kind: str, size: int) -> None:
    reports: list[RankReport] = on_ranks(size, run_rank, config_for(kind, size), requests())
    assert all(report == reports[0] for report in reports)
    single = run_rank(config_for(kind, 1), 0, free_rendezvous(), requests())
    assert reports[0].outputs == single.outputs
    assert reports[0].saw_collectives
    assert not single.saw_collectives
    assert reports[0].error == single.error == "plan 1 is of epoch 0; epoch 1 has begun"
    prompt, params = requests()[0]
    assert single.outputs[0] == reference_greedy(tiny_model(kind), prompt, params.max_tokens)[0]
    # A KV head that several ranks hold is paid for several times; else the group's budget buys the same.
    replicas = size if kind == "mistral" else 1
    assert reports[0].limits.num_blocks == single.limits.num_blocks // replicas


def test_ranks_that_do_not_come_are_named() -> None:
    config = config_for("llama", 2)
    (error,) = on_ranks(1, load_rank, config)
    assert error.startswith("RuntimeError: rank 0 of 2 could not join the group at tcp://127.0.0.1")


def test_a_size_that_cannot_split_the_model_is_an_error_before_any_rank_waits() -> None:
    worker = Worker(config_for("llama", 4), 0, "tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="tensor_parallel_size 4 cannot split 6 query heads"):
        worker.load()


def test_a_single_rank_needs_no_rendezvous() -> None:
    worker = Worker(config_for("llama", 1))
    worker.load()
    worker.allocate(worker.measure())
    worker.shutdown()
