"""Sampling and log-probabilities of whole rows of logits on the CPU, in C++: `sampling.cpp` and `logprobs.cpp`."""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from workers.kernels.build import BuildError
from workers.kernels.library import POINTER, SIZE, SUFFIXES, library

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

PARAMETERS = np.dtype(
    [
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.int64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
    ]
)
"""One slot's parameters, laid out as the C structure of this name."""


class SamplingKernels:
    """For logits [rows, vocab] over the whole vocabulary; of dtypes without kernels, and with gaps in a row, copies."""

    def __init__(self) -> None:
        """Raises BuildError and OSError when there is no library."""
        self._sample = {
            dtype: library().function("sample" + suffix, POINTER, *[SIZE] * 3, *[POINTER] * 3, SIZE, *[POINTER] * 7)
            for dtype, suffix in SUFFIXES.items()
        }
        self._logprobs = {
            dtype: library().function(
                "logprobs" + suffix, POINTER, SIZE, POINTER, SIZE, SIZE, POINTER, SIZE, *[POINTER] * 3
            )
            for dtype, suffix in SUFFIXES.items()
        }

    def sample(
        self,
        logits: torch.Tensor,
        parameters_address: int,
        slots: IntArray,
        tokens: torch.Tensor,
        context_lens: IntArray,
        output_positions: IntArray,
        additions: tuple[IntArray, IntArray, FloatArray] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids [rows] int64, which rows are finite [rows] bool).

        A row takes what is at its slot of parameters_address, where an array of PARAMETERS lies, and of tokens, int32
        [slots, longest]; of these its first context_lens, whose last come from the output.
        additions: (where each row's begin [rows + 1], token ids, what is added to their logits).
        """
        logits = _readable(logits)
        rows, vocab_size = logits.shape
        of_rows = torch.from_numpy(np.array((slots, context_lens, output_positions), np.int64))
        address, column = of_rows.data_ptr(), 8 * rows
        starts, added_ids, added = (None, None, None) if additions is None else map(torch.from_numpy, additions)
        token_ids = torch.empty(rows, dtype=torch.int64)
        finite = torch.empty(rows, dtype=torch.bool)
        self._sample[logits.dtype](
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocab_size,
            parameters_address,
            address,
            tokens.data_ptr(),
            tokens.stride(0),
            address + column,
            address + 2 * column,
            None if starts is None else starts.data_ptr(),
            None if added_ids is None else added_ids.data_ptr(),
            None if added is None else added.data_ptr(),
            token_ids.data_ptr(),
            finite.data_ptr(),
        )
        return token_ids, finite

    def logprobs(
        self, logits: torch.Tensor, rows: IntArray, token_ids: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the logits' rows at `rows`, all float32 or int64: (log-probabilities of token_ids [rows], the best ids
        [rows, num_top], their log-probabilities [rows, num_top]). NaN where a row is not finite.
        """
        logits = _readable(logits)
        picked, token_ids = torch.from_numpy(np.ascontiguousarray(rows, np.int64)), token_ids.contiguous()
        logprobs = torch.empty(len(rows))
        top_ids = torch.empty(len(rows), num_top, dtype=torch.int64)
        top_logprobs = torch.empty(len(rows), num_top)
        self._logprobs[logits.dtype](
            logits.data_ptr(),
            logits.stride(0),
            picked.data_ptr(),
            len(rows),
            logits.shape[1],
            token_ids.data_ptr(),
            num_top,
            logprobs.data_ptr(),
            top_ids.data_ptr(),
            top_logprobs.data_ptr(),
        )
        return logprobs, top_ids, top_logprobs


@cache
def _kernels() -> SamplingKernels | None:
    try:
        return SamplingKernels()
    except (OSError, BuildError):
        return None


def sampling_kernels(device: torch.device) -> SamplingKernels | None:
    """None where they cannot run; `workers.kernels.selection.select_kernels` tells the log why."""
    return _kernels() if device.type == "cpu" else None


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """Logits that C can read: of a dtype there are kernels for, a row in one piece."""
    if logits.dtype not in SUFFIXES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()
