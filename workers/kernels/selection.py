"""Which kernels run here."""

import contextlib
import logging

import torch

from workers.kernels.base import Kernels
from workers.kernels.build import BuildError
from workers.kernels.library import library
from workers.kernels.linear import products_of_bfloat16
from workers.kernels.native import NativeKernels
from workers.kernels.torch_kernels import TorchKernels

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The native kernels where they can run, else torch's; the log says why."""
    if device.type != "cpu":
        return TorchKernels()
    try:
        kernels = NativeKernels(dtype)
    except (ValueError, OSError, BuildError) as error:
        logger.warning("kernels in plain torch, which are slower: %s", error)
        return TorchKernels()
    logger.info("compiled kernels; products of bfloat16 %s", products_of_bfloat16())
    return kernels


def set_kernel_threads(count: int) -> None:
    """Threads of the compiled kernels, if there are any. Call it while none runs."""
    with contextlib.suppress(OSError, BuildError):  # `select_kernels` says why there are none
        library().set_num_threads(count)
