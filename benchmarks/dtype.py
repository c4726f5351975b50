"""The dtype that a benchmark of kernels runs in, as an option."""

import argparse

import torch

from workers.device import select_dtype

_CPU = torch.device("cpu")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype, by default what the service computes in on this processor."""
    parser.add_argument(
        "--dtype",
        type=_dtype,
        default="auto",
        help="bfloat16 or float32; by default what the service computes in on this processor",
    )


def _dtype(name: str) -> torch.dtype:
    if name not in ("auto", "bfloat16", "float32"):
        raise argparse.ArgumentTypeError(f"no kernels for {name!r}; there are bfloat16 and float32")
    return select_dtype(name, _CPU, torch.bfloat16)
