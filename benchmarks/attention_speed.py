"""Attention of one layer in C++ against the same in torch, on SmolLM2-135M's shapes.

A step is B decodes over a context (B x context), chunks with the context before them (rows + context), or both.
Every layer has a cache of its own, whose blocks are handed out at random. The floor is the larger of the time that
the keys and values take at the read bandwidth measured here and the time that the products take at the rate of
torch's product of two 2048 x 2048 matrices. Times are medians a layer in microseconds; the contenders take turns.

    python -m benchmarks attention_speed --case 32x1024 --case 256+1024
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.counts import positive
from benchmarks.floor import floor_seconds, multiplying, reading, seconds_of
from benchmarks.options import add_dtype, add_threads, set_threads
from benchmarks.summary import table
from workers.attention import AttentionBackend, AttentionMetadata, select_backend

QUERY_HEADS, KV_HEADS, HEAD_DIM, NUM_LAYERS = 9, 3, 64, 30
BLOCK = 16
DECODES = [(requests, context) for context in (128, 1024, 4096) for requests in (1, 8, 32)]
CHUNKS = [(rows, context) for rows in (256, 512) for context in (0, 1024, 4096)]
CASES = [
    *(f"{requests}x{context}" for requests, context in DECODES),
    *(f"{rows}+{context}" for rows, context in CHUNKS),
    "256+1024,16x1024",
]
REPEATS = 9
CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Step:
    """Requests of one step: how many rows each has, and how many tokens with them."""

    query_lens: list[int]
    seq_lens: list[int]

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Of the keys and values that one layer reads at least once."""
        return 2 * sum(self.seq_lens) * KV_HEADS * HEAD_DIM * dtype.itemsize

    @property
    def flops(self) -> int:
        """Of one layer's products, hidden keys left out."""
        seen = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(self.query_lens, self.seq_lens, strict=True))
        return 4 * seen * QUERY_HEADS * HEAD_DIM


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(
        "attention_speed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", action="append", type=_case, help=f"by default each of {', '.join(CASES)}")
    add_dtype(parser)
    add_threads(parser)
    parser.add_argument("--repeats", type=positive, default=REPEATS)
    options = parser.parse_args(argv)
    set_threads(options.threads)
    device = torch.device("cpu")
    backends = [select_backend(name, device, options.dtype, HEAD_DIM) for name in ("native", "torch")]
    header = ["step", "native", "torch", "torch / native", "floor", "native / floor", "GB/s", "GFLOP/s",
              "write native", "write torch"]  # fmt: skip
    with torch.inference_mode():
        lines = [_line(case, backends, options.dtype, options.repeats) for case in options.case or CASES]
    print(table(header, lines), flush=True)
    return 0


def parse(case: str) -> Step:
    """ "32x1024": decodes with that many tokens each; "256+1024": a chunk after a context; commas join them.

    Raises ValueError for anything else, and for a part without rows or a decode without tokens.
    """
    query_lens: list[int] = []
    seq_lens: list[int] = []
    for part in case.split(","):
        if "x" in part:
            requests, tokens = map(int, part.split("x"))
            if requests < 1 or tokens < 1:
                raise ValueError(part)
            query_lens += [1] * requests
            seq_lens += [tokens] * requests
        else:
            rows, context = map(int, part.split("+"))
            if rows < 1 or context < 0:
                raise ValueError(part)
            query_lens.append(rows)
            seq_lens.append(rows + context)
    return Step(query_lens, seq_lens)


def _case(text: str) -> str:
    try:
        parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no step; it may be like {', '.join(CASES[-2:])}") from None
    return text


def _line(case: str, backends: list[AttentionBackend], dtype: torch.dtype, repeats: int) -> list[str]:
    step = parse(case)
    metadata, num_blocks = _metadata(step)
    kv_bytes = step.kv_bytes(dtype)
    num_layers = max(2, min(NUM_LAYERS, CACHE_BYTES // (num_blocks * kv_bytes // sum(step.seq_lens) * BLOCK)))
    runs: list[Callable[[], None]] = []
    for backend in backends:
        runs += _passes(backend, metadata, dtype, num_blocks, num_layers)
    runs += [reading(), multiplying(dtype)]
    for run in runs:
        run()
    seconds = [[seconds_of(run) for run in runs] for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    write, attend, torch_write, torch_attend = (value / num_layers for value in medians[:4])
    floor = floor_seconds(kv_bytes, step.flops, *medians[4:])
    micros = [f"{value * 1e6:.0f}" for value in (attend, torch_attend, floor, write, torch_write)]
    return [
        case, micros[0], micros[1], f"{torch_attend / attend:.1f}", micros[2], f"{attend / floor:.2f}",
        f"{kv_bytes / attend / 1e9:.1f}", f"{step.flops / attend / 1e9:.0f}", micros[3], micros[4],
    ]  # fmt: skip


def _metadata(step: Step) -> tuple[AttentionMetadata, int]:
    counts = [-(-n // BLOCK) for n in step.seq_lens]
    ids = random.Random(0).sample(range(sum(counts)), sum(counts))
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    slots = [
        blocks[position // BLOCK] * BLOCK + position % BLOCK
        for query_len, seq_len, blocks in zip(step.query_lens, step.seq_lens, tables, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *step.query_lens]).cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor(step.seq_lens, dtype=torch.int32),
        block_table=torch.tensor([blocks + [0] * (max(counts) - len(blocks)) for blocks in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        max_query_len=max(step.query_lens),
        max_seq_len=max(step.seq_lens),
        host_query_lens=step.query_lens,
        host_seq_lens=step.seq_lens,
    )
    return metadata, sum(counts)


def _passes(
    backend: AttentionBackend, metadata: AttentionMetadata, dtype: torch.dtype, num_blocks: int, num_layers: int
) -> list[Callable[[], None]]:
    """All layers' `rotate_and_write`, and all layers' `attend`; the step is prepared in the first."""
    shape = backend.kv_cache_shape(num_blocks, BLOCK, KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, dtype=dtype) for _ in range(num_layers)]
    tokens = len(metadata.slot_mapping)
    qkv = torch.randn(tokens, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    cos_sin = torch.randn(tokens, 2, HEAD_DIM, dtype=dtype) * 0.5
    step = backend.prepare(metadata, caches[0], None)
    q = torch.randn(tokens, QUERY_HEADS, HEAD_DIM, dtype=dtype)

    def write() -> None:
        for cache in caches:
            backend.rotate_and_write(qkv, cos_sin, None, QUERY_HEADS, cache, step)

    def attend() -> None:
        for cache in caches:
            backend.attend(q, cache, step, HEAD_DIM**-0.5)

    return [write, attend]


if __name__ == "__main__":
    sys.exit(main())
