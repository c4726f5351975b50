"""Greedy output equals Hugging Face transformers in float32 under every chunking, batch mix and TP size."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from oracle import Outcome, RankGroup, assert_greedy, build_scheduler, generate, greedy
from tiny_models import VOCAB_SIZE, tiny_model

from cluster.models.store import open_store
from cluster.settings.tree import DEFAULT_MODEL
from scheduler.request import Request
from workers.config import WorkerConfig

MODELS = (DEFAULT_MODEL, "llama", "mistral", "qwen2", "qwen3")
BUDGETS = (16, 64, 512)
TP_SIZES = (1, 2, 3)
DEPTHS = (1, 2)
SCENARIOS = ("mix", "tiny_kv", "shared_prefix")
FULL = list(product(MODELS, BUDGETS, TP_SIZES, DEPTHS, SCENARIOS))


def pairwise(rows: list[tuple]) -> list[tuple]:
    """A small subset of `rows` in which every pair of values of two columns still appears (greedy cover)."""

    def pairs(row: tuple) -> set:
        return {(i, row[i], j, row[j]) for i in range(len(row)) for j in range(i + 1, len(row))}

    missing = set().union(*(pairs(row) for row in rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen, key=lambda row: (row[2], row[0]))


PAIRWISE = pairwise(FULL)


@cache
def path_of(model: str) -> str:
    return str(open_store(print).resolve(model).directory) if model == DEFAULT_MODEL else tiny_model(model)


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, RankGroup]]:
    opened: dict[int, RankGroup] = {}
    yield opened
    for group in opened.values():
        group.stop()


def requests_of(scenario: str, model: str, rng: random.Random) -> list[tuple[int, Request]]:
    """12 requests that arrive over the first steps. With tiny KV more prompts are admitted than can grow."""
    top = 40_000 if model == DEFAULT_MODEL else VOCAB_SIZE
    prefix = [rng.randrange(10, top) for _ in range(40)] if scenario == "shared_prefix" else []
    longest, outputs = (14, (24, 40)) if scenario == "tiny_kv" else (90 - len(prefix), (4, 16))
    arrivals = []
    for index in range(12):
        prompt = prefix + [rng.randrange(10, top) for _ in range(rng.randrange(3, longest))]
        arrivals.append((rng.randrange(12), Request(f"r{index}", prompt, greedy(rng.randrange(*outputs)))))
    return arrivals


def run_case(groups: dict[int, RankGroup], case: tuple) -> tuple[Outcome, list[Request]]:
    model, budget, size, depth, scenario = case
    group = groups.get(size) or groups.setdefault(size, RankGroup(size))
    limits = group.open(
        WorkerConfig(
            model_path=path_of(model),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=128,
            dtype="float32",
            num_threads=1,
            num_blocks=8 if scenario == "tiny_kv" else 128,
        )
    )
    arrivals = requests_of(scenario, model, random.Random(str(case)))
    outcome = generate(group, build_scheduler(limits, budget, depth, max_num_seqs=8), arrivals)
    group.close()
    return outcome, [request for _, request in arrivals]


def check_case(groups: dict[int, RankGroup], case: tuple) -> None:
    outcome, requests = run_case(groups, case)
    for request in requests:
        output = outcome.tokens[request.request_id]
        assert_greedy(path_of(case[0]), request.prompt_token_ids, output)
    stats = outcome.scheduler.stats()
    assert stats.num_used_blocks == 0
    if case[4] == "tiny_kv":
        assert sum(stats.num_preemptions.values()) > 0
    if case[4] == "shared_prefix":
        assert stats.prefix_cache_hits > 0
        assert stats.prefix_cache_hits == sum(outcome.cached.values()) == stats.prompt_tokens_cached


@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: "-".join(map(str, case)))
def test_greedy_tokens_equal_the_reference(groups: dict[int, RankGroup], case: tuple) -> None:
    check_case(groups, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in FULL if c not in PAIRWISE], ids=lambda case: "-".join(map(str, case)))
def test_greedy_tokens_equal_the_reference_full(groups: dict[int, RankGroup], case: tuple) -> None:
    check_case(groups, case)
