"""Our linear layers against F.linear and oneDNN with packed weights, on SmolLM2-135M's shapes.

The floor of a pass over all layers is the larger of the time its weights take at the read bandwidth measured
here and the time its multiplications take at the rate of torch's product of two 2048 x 2048 matrices. Ours
includes the activation between gate and up, the others' does not. Every line is a median, and the contenders
take turns. The floor is measured in the same minute as a line: memory is shared with other machines.

    python -m benchmarks linear_speed --rows 1 --rows 16
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.counts import positive
from benchmarks.floor import floor_seconds, multiplying, reading, seconds_of
from benchmarks.options import add_dtype, add_threads, set_threads
from benchmarks.summary import table
from workers.kernels.linear import PackedGatedLinear, PackedLinear

HIDDEN, FFN, QKV, VOCAB, NUM_LAYERS = 576, 1536, 960, 49152, 30
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 11

Layer = Callable[[torch.Tensor], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each number of rows: of all layers without the head, and of the head."""
    parser = argparse.ArgumentParser("linear_speed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=positive, action="append", help=f"by default each of {ROWS}")
    add_dtype(parser)
    add_threads(parser)
    parser.add_argument("--repeats", type=positive, default=REPEATS)
    options = parser.parse_args(argv)
    set_threads(options.threads)
    with torch.inference_mode():
        for name, shapes in (
            ("layers", [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)] * NUM_LAYERS),
            ("head", [(VOCAB, HIDDEN)]),
        ):
            # Of a checkpoint in bfloat16, whatever they are computed in.
            weights = [(torch.randn(shape) / shape[1] ** 0.5).bfloat16().to(options.dtype) for shape in shapes]
            lines = [_line(weights, rows, options.repeats) for rows in options.rows or ROWS]
            header = [name, "ours ms", "F.linear", "oneDNN", "floor", "ours / floor", "GB/s", "GFLOP/s"]
            print(table(header, lines), end="\n\n", flush=True)
    return 0


def _line(weights: list[torch.Tensor], rows: int, repeats: int) -> list[str]:
    num_weights = sum(weight.numel() for weight in weights)
    dtype = weights[0].dtype
    inputs = {size: torch.randn(rows, size, dtype=dtype) for size in {weight.shape[1] for weight in weights}}
    contenders = [
        _pass([make(weight, rows) for weight in weights], weights, inputs) for make in (_ours, _torch, _onednn)
    ]
    runs = [*contenders, reading(), multiplying(dtype)]
    for run in runs:
        run()
    seconds = [[seconds_of(run) for run in runs] for _ in range(repeats)]
    ours, plain, onednn, *limits = (statistics.median(column) for column in zip(*seconds, strict=True))
    moved, flops = 2 * num_weights, 2 * num_weights * rows
    floor = floor_seconds(moved, flops, *limits)
    times = [f"{value * 1e3:.2f}" for value in (ours, plain, onednn, floor)]
    return [f"M={rows}", *times, f"{ours / floor:.2f}", f"{moved / ours / 1e9:.1f}", f"{flops / ours / 1e9:.0f}"]


def _pass(layers: list[Layer], weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> Callable[[], None]:
    calls = [(layer, inputs[weight.shape[1]]) for layer, weight in zip(layers, weights, strict=True)]

    def run() -> None:
        for layer, x in calls:
            layer(x)

    return run


def _ours(weight: torch.Tensor, rows: int) -> Layer:
    if weight.shape[0] == 2 * FFN:
        return PackedGatedLinear(*weight.chunk(2))
    return PackedLinear(weight)


def _torch(weight: torch.Tensor, rows: int) -> Layer:
    return lambda x: F.linear(x, weight)


def _onednn(weight: torch.Tensor, rows: int) -> Layer:
    """As torch.compile packs weights when they are frozen; these operators have no public name."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


if __name__ == "__main__":
    sys.exit(main())
