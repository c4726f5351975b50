"""What sampling a row costs over SmolLM2's vocabulary: the kernels in C++ against plain torch, by kind of request.

Both sample the same rows in turn, and must give the same tokens. Times are medians in milliseconds a row and hold
everything between the logits and the tensors of tokens; "ratio" is torch's over ours.

    python -m benchmarks sampling_speed --rows 1 --rows 16
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.counts import positive
from benchmarks.options import add_dtype, add_threads, set_threads
from benchmarks.summary import table
from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers.batch import RowSet
from workers.kernels.sampling import SamplingKernels
from workers.request_state import RequestState
from workers.sampler import SampledTokens, sample
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards

VOCAB = 49152
ROWS = (1, 16, 64)
REPEATS = 11
CONTEXT = 512
SPREAD = 3.0
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "three penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, 5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where both give different tokens."""
    parser = argparse.ArgumentParser(
        "sampling_speed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=positive, action="append", help=f"by default each of {ROWS}")
    add_threads(parser)
    parser.add_argument("--repeats", type=positive, default=REPEATS)
    add_dtype(parser)
    options = parser.parse_args(argv)
    set_threads(options.threads)
    lines, same = [], True
    with torch.inference_mode():
        for rows in options.rows or ROWS:
            logits = (SPREAD * torch.randn(rows, VOCAB)).to(options.dtype)
            for kind in (*KINDS, "all of these in turn"):
                ours, torchs, equal = _compare(logits, kind, options.repeats)
                lines.append([kind, rows, f"{ours:.3f}", f"{torchs:.3f}", f"{torchs / ours:.1f}"])
                same = same and equal
    print(table(["request", "rows", "ours ms a row", "torch", "ratio"], lines))
    if not same:
        print("the kernels and torch gave different tokens", file=sys.stderr)
    return 0 if same else 1


def _compare(logits: torch.Tensor, kind: str, repeats: int) -> tuple[float, float, bool]:
    """Milliseconds a row by the kernels and by torch, and whether their tokens are the same."""
    num_rows = len(logits)
    rows, state = _mirror(num_rows, kind)
    shards = VocabShards(TensorParallel(), [VOCAB])

    def run(kernels: SamplingKernels | None) -> tuple[float, SampledTokens]:
        started = time.perf_counter()
        sampled = sample(logits, rows, state, shards, kernels)
        return 1e3 * (time.perf_counter() - started) / num_rows, sampled

    leaves = (SamplingKernels(), None)
    ours, torchs = (run(leaf)[1].token_ids for leaf in leaves)
    times = [[run(leaf)[0] for leaf in leaves] for _ in range(repeats)]
    our_ms, torch_ms = (statistics.median(column) for column in zip(*times, strict=True))
    return our_ms, torch_ms, ours.equal(torchs)


def _mirror(num_rows: int, kind: str) -> tuple[RowSet, RequestState]:
    """Requests with half of their context generated, and the row each of them samples."""
    generator = np.random.default_rng(0)
    state = RequestState(num_rows, CONTEXT + 1, CONTEXT + 1, torch.device("cpu"))
    plan = StepPlan(0, 0, {})
    kinds = [KINDS[kind]] if kind in KINDS else list(KINDS.values())
    for index in range(num_rows):
        params = SamplingParams(max_tokens=CONTEXT, seed=index, **kinds[index % len(kinds)])  # type: ignore[arg-type]
        tokens = generator.integers(0, VOCAB, CONTEXT).tolist()
        plan.new_requests.append(NewRequest(str(index), tokens, CONTEXT // 2, params, [0], 0))
    state.apply_plan(plan)
    numbers = np.arange(num_rows)
    slots = state.slots_of([str(index) for index in numbers])
    return RowSet(numbers, slots, numbers, np.full(num_rows, CONTEXT)), state


if __name__ == "__main__":
    sys.exit(main())
