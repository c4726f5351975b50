"""Options that several benchmarks have, and the dtype that they run in."""

import argparse

import torch

from benchmarks.counts import positive
from benchmarks.errors import BenchmarkError
from workers.device import select_dtype
from workers.kernels.build import BuildError
from workers.kernels.library import library

_CPU = torch.device("cpu")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Adds --threads, by default torch's own number."""
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="of torch and of our kernels")


def set_threads(count: int) -> None:
    """Of torch and of our kernels. Raises BenchmarkError where these cannot run."""
    torch.set_num_threads(count)
    try:
        library().set_num_threads(count)
    except (BuildError, OSError) as error:
        raise BenchmarkError(f"there are no compiled kernels to measure: {error}") from error


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype, by default what the service computes in on this processor."""
    parser.add_argument("--dtype", type=_dtype, default="auto", help="bfloat16 or float32; default: the service's here")


def processor_dtype() -> str:
    """What servers compute in fastest on this processor: bfloat16 where it has the instructions, else float32."""
    return str(_dtype("auto")).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    if name not in ("auto", "bfloat16", "float32"):
        raise argparse.ArgumentTypeError(f"no kernels for {name!r}; there are bfloat16 and float32")
    return select_dtype(name, _CPU, torch.bfloat16)
