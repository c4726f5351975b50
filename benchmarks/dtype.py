"""The dtype that benchmarks run in."""

import argparse

import torch

from workers.device import select_dtype

_CPU = torch.device("cpu")


def processor_dtype() -> str:
    """What servers compute in fastest on this processor: bfloat16 where it has the instructions, else float32."""
    return str(_dtype("auto")).removeprefix("torch.")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype, by default what the service computes in on this processor."""
    parser.add_argument(
        "--dtype",
        type=_dtype,
        default="auto",
        help="bfloat16 or float32",
    )


def _dtype(name: str) -> torch.dtype:
    if name not in ("auto", "bfloat16", "float32"):
        raise argparse.ArgumentTypeError(f"no kernels for {name!r}; there are bfloat16 and float32")
    return select_dtype(name, _CPU, torch.bfloat16)
