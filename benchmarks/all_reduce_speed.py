"""Sums over ranks on one machine: through shared memory against Gloo, and their share of a decode step.

Every rank notes when it comes to a sum and when it leaves. A sum itself begins when the last rank has come:
the wait for that one is the ranks' imbalance and no cost of the sum. `last` is the time of the rank that came
last, `all` that of every rank, in which a rank may also have to wait for a core where ranks outnumber them.
Between two sums of the first table every rank is busy for 50 to 150 microseconds; the second is of a random
Llama of SmolLM2-135M's shape in bfloat16.

    python -m benchmarks all_reduce_speed --ranks 2 --ranks 3

Exits with 1 where the sum itself takes more than 5% of a decode step.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.counts import positive
from benchmarks.random_model import LlamaShape, write_model
from benchmarks.rank_group import SECONDS, CallSeconds, Recorded, Times, call_seconds, run_ranks
from benchmarks.summary import percentile, table
from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers.collectives import Collectives, ProcessGroupCollectives
from workers.config import WorkerConfig
from workers.shared_memory import SharedMemoryCollectives
from workers.tensor_parallel import TensorParallel
from workers.worker import Worker

CPU = torch.device("cpu")
KINDS = ("shared memory", "gloo")
HIDDEN = 576
ROWS = (1, 4, 16, 64, 256)
DTYPES = (torch.bfloat16, torch.float32)
NUM_CALLS = {"shared memory": 400, "gloo": 150}
WARM_CALLS = 20
SMOLLM2 = LlamaShape(HIDDEN, 1536, 30, 9, 3, 49152)
BATCHES = (1, 16)
CONTEXT = 64
WARM_STEPS = 10
LIMIT = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables for each number of ranks; exit code 1 when the target is missed."""
    parser = argparse.ArgumentParser(
        "all_reduce_speed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, action="append", help="by default 2 and 3")
    parser.add_argument("--steps", type=positive, default=60, help="decode steps of a line")
    options = parser.parse_args(argv)
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="chunkserve-all-reduce-") as folder:
        write_model(SMOLLM2, Path(folder), torch.bfloat16)
        for size in options.ranks or (2, 3):
            print(_sums_table(size), end="\n\n", flush=True)
            shares += _decode_table(size, folder, options.steps)
    if max(shares) > LIMIT:
        print(f"a sum itself takes up to {max(shares):.1%} of a decode step, above {LIMIT:.0%}", file=sys.stderr)
        return 1
    return 0


def _collectives(kind: str, rank: int, size: int) -> Collectives:
    if kind == "gloo":
        return ProcessGroupCollectives(size, CPU)
    return SharedMemoryCollectives(rank, size, SECONDS)


def _sums_table(size: int) -> str:
    lines = []
    ranks = run_ranks(size, _sums)
    for dtype in DTYPES:
        for rows in ROWS:
            calls = {kind: call_seconds([rank[kind, dtype, rows] for rank in ranks]) for kind in KINDS}
            ratio = statistics.median(calls["gloo"].every) / statistics.median(calls["shared memory"].every)
            name = f"{rows} x {HIDDEN} {str(dtype).removeprefix('torch.')}"
            lines.append([name, *_microseconds(calls["shared memory"]), *_microseconds(calls["gloo"]), f"{ratio:.0f}"])
    header = [f"{size} ranks, us", *("last p50", "p99", "all p50", "p99", "gloo last p50", "p99", "all p50", "p99")]
    header.append("gloo / ours")
    return table(header, lines)


def _microseconds(calls: CallSeconds) -> list[str]:
    return [f"{percentile(seconds, p) * 1e6:.1f}" for seconds in (calls.last, calls.every) for p in (50, 99)]


def _sums(rank: int, size: int, rendezvous: str) -> dict[tuple[str, torch.dtype, int], Times]:
    """One rank's times, by kind, dtype and rows."""
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, size, rendezvous, CPU, SECONDS)
    times = {}
    chance = random.Random(rank)
    for kind in KINDS:
        for dtype in DTYPES:
            for rows in ROWS:
                recorded = Recorded(_collectives(kind, rank, size))
                tensor = torch.zeros(rows, HIDDEN, dtype=dtype)
                for _ in range(WARM_CALLS + NUM_CALLS[kind]):
                    busy_until = time.monotonic_ns() + chance.randrange(50_000, 150_000)
                    while time.monotonic_ns() < busy_until:
                        pass
                    recorded.all_reduce(tensor)
                recorded.close()
                times[kind, dtype, rows] = recorded.times[WARM_CALLS:]
    tp.close()
    return times


class _RecordedWorker(Worker):
    """A rank whose collectives are of a chosen kind and recorded."""

    def __init__(self, config: WorkerConfig, rank: int, rendezvous: str, kind: str) -> None:
        super().__init__(config, rank, rendezvous)
        self.kind = kind

    def _connect(self) -> TensorParallel:
        tp = super()._connect()
        self.recorded = Recorded(_collectives(self.kind, tp.rank, tp.size))
        return TensorParallel(tp.rank, tp.size, CPU, self.recorded)


def _decode_table(size: int, model_path: str, num_steps: int) -> list[float]:
    """Prints it; the shares of a step that sums through shared memory themselves take."""
    lines, shares = [], []
    for kind in KINDS:
        ranks = run_ranks(size, _decode, model_path, num_steps, kind)
        for batch in BATCHES:
            steps = [seconds for seconds, _, _ in (rank[batch] for rank in ranks)]
            step = statistics.fmean(map(max, zip(*steps, strict=True)))
            calls = call_seconds([times for _, times, _ in (rank[batch] for rank in ranks)])
            per_step = len(calls.last) / num_steps
            took = [statistics.fmean(seconds) * per_step for seconds in (calls.last, calls.every)]
            whole = statistics.fmean((left - came) / 1e9 for rank in ranks for came, left in rank[batch][1]) * per_step
            waited = whole - took[1]
            columns = [f"{1e3 * waited:.2f}", *(f"{1e3 * seconds:.2f}" for seconds in took)]
            lines.append([f"{batch} decoding, {kind}", f"{1e3 * step:.1f}", *columns, f"{took[0] / step:.1%}"])
            if kind == "shared memory":
                shares.append(took[0] / step)
            assert len({rank[batch][2] for rank in ranks}) == 1, "ranks sampled different tokens"
    header = [f"{size} ranks, ms a step", "step", "for the last", "sums: last", "sums: all", "last / step"]
    print(table(header, lines), end="\n\n", flush=True)
    return shares


def _decode(
    rank: int, size: int, rendezvous: str, model_path: str, num_steps: int, kind: str
) -> dict[int, tuple[list[float], Times, str]]:
    """By batch: seconds of each step, times of its collectives, and the tokens."""
    blocks_each = -(-(CONTEXT + WARM_STEPS + num_steps) // 32) * 2
    config = WorkerConfig(
        model_path,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=CONTEXT,
        max_model_len=blocks_each * 16,
        dtype="bfloat16",
        device="cpu",
        tensor_parallel_size=size,
        block_size=16,
        num_blocks=max(BATCHES) * blocks_each,
        rendezvous_seconds=SECONDS,
    )
    worker = _RecordedWorker(config, rank, rendezvous, kind)
    worker.load()
    worker.allocate(worker.measure())
    params = SamplingParams(max_tokens=blocks_each * 16, temperature=0.0)
    results: dict[int, tuple[list[float], Times, str]] = {}
    finished: list[str] = []
    step_id = 0
    for batch in BATCHES:
        names = [f"{batch}-{index}" for index in range(batch)]
        for index, name in enumerate(names):
            blocks = list(range(index * blocks_each, (index + 1) * blocks_each))
            new = NewRequest(name, [index + 2] * CONTEXT, CONTEXT, params, blocks, 0)
            plan = StepPlan(0, step_id, {name: CONTEXT}, new_requests=[new], finished_request_ids=finished)
            worker.execute_step(plan)
            finished = []
            step_id += 1
        seconds, tokens = [], []
        for step in range(WARM_STEPS + num_steps):
            if step == WARM_STEPS:
                worker.recorded.times.clear()
            started = time.perf_counter()
            result = worker.execute_step(StepPlan(0, step_id, dict.fromkeys(names, 1)))
            seconds.append(time.perf_counter() - started)
            tokens.append(result.sampled_token_ids)
            step_id += 1
        results[batch] = (seconds[WARM_STEPS:], worker.recorded.times[:], str(tokens))
        finished = names
    worker.shutdown()
    return results


if __name__ == "__main__":
    sys.exit(main())
