"""The largest logit of each row, on the CPU in C++: `argmax.cpp`."""

from collections.abc import Callable
from functools import cache

import torch

from workers.kernels.build import BuildError
from workers.kernels.library import POINTER, SIZE, SUFFIXES, library


def argmax_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest value [rows], its column [rows] int64) of logits [rows, columns].

    Ties go to the lowest column. A NaN is larger than any number.
    """
    function = _functions().get(logits.dtype) if logits.device.type == "cpu" else None
    if function is None:
        columns = logits.argmax(dim=1)
        return logits.gather(1, columns[:, None]).squeeze(1), columns
    rows, size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    largest, columns = logits.new_empty(rows), torch.empty(rows, dtype=torch.int64)
    function(logits.data_ptr(), logits.stride(0), rows, size, largest.data_ptr(), columns.data_ptr())
    return largest, columns


@cache
def _functions() -> dict[torch.dtype, Callable[..., int]]:
    """Empty where there is no library; `workers.kernels.selection.select_kernels` tells the log why."""
    try:
        return {
            dtype: library().function("argmax" + suffix, POINTER, SIZE, SIZE, SIZE, POINTER, POINTER)
            for dtype, suffix in SUFFIXES.items()
        }
    except (OSError, BuildError):
        return {}
