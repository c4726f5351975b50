"""Which kernels run here."""

import logging

import torch

from workers.kernels.base import Kernels
from workers.kernels.build import BuildError
from workers.kernels.native import NativeKernels
from workers.kernels.torch_kernels import TorchKernels

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The native kernels where they can run, else torch's; the log says why."""
    if device.type != "cpu":
        return TorchKernels()
    try:
        return NativeKernels(dtype)
    except (ValueError, OSError, BuildError) as error:
        logger.warning("kernels in plain torch, which are slower: %s", error)
        return TorchKernels()
