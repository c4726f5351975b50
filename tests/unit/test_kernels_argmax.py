"""The largest logit of each row in C++ against torch's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kernels.argmax import argmax_rows
from workers.kernels.library import library


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=100)
@given(
    rows=st.integers(1, 60),
    size=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    faults=st.lists(
        st.tuples(st.integers(0, 59), st.integers(0, 99), st.sampled_from([math.nan, math.inf])), max_size=5
    ),
    seed=st.integers(0, 10**6),
)
def test_argmax_is_that_of_torch(
    threads: int, rows: int, size: int, dtype: torch.dtype, faults: list[tuple[int, int, float]], seed: int
) -> None:
    library().set_num_threads(threads)
    logits = torch.randn(rows, size + 3, generator=torch.Generator().manual_seed(seed)).mul(2).round()  # many ties
    for row, column, fault in faults:
        logits[row % rows, column % size] = fault
    logits = logits.to(dtype)[:, :size]
    expected = logits.float().argmax(dim=1)
    largest, columns = argmax_rows(logits)
    assert columns.equal(expected)
    torch.testing.assert_close(largest, logits.gather(1, expected[:, None])[:, 0], rtol=0, atol=0, equal_nan=True)


def test_a_row_of_nothing_but_minus_infinity_and_columns_apart() -> None:
    nothing = torch.full((1, 20), -math.inf)
    assert [x.item() for x in argmax_rows(nothing)] == [-math.inf, 0]
    assert argmax_rows(torch.arange(40.0).view(20, 2).t())[1].tolist() == [19, 19]
