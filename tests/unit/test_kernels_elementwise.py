"""Norm and activation in C++ against torch's, in float32 and bfloat16, for sizes that fill no whole vector."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kernels.library import library
from workers.kernels.native import NativeGatedLinear, NativeKernels
from workers.kernels.torch_kernels import TorchKernels

DTYPES = (torch.float32, torch.bfloat16)
# A unit in the last place: both sides round the same float32 value, computed in different orders.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    library().set_num_threads(request.param)
    yield
    library().set_num_threads(1)


def random(rows: int, size: int, seed: int, dtype: torch.dtype, scale: float = 2.0) -> torch.Tensor:
    return (scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))).to(dtype)


shapes = st.tuples(st.integers(1, 40), st.integers(1, 600), st.integers(0, 2**32), st.sampled_from(DTYPES))


@settings(max_examples=60, deadline=None)
@given(shapes, st.booleans())
def test_add_norm(shape: tuple[int, int, int, torch.dtype], adds: bool) -> None:
    rows, size, seed, dtype = shape
    weight = random(1, size, seed + 1, dtype)[0]
    residual, delta = random(rows, size, seed, dtype), random(rows, size, seed + 2, dtype) if adds else None
    ours, theirs = residual.clone(), residual.clone()
    out = NativeKernels(dtype).add_norm(weight, 1e-5)(ours, delta)
    expected = TorchKernels().add_norm(weight.float(), 1e-5)(
        theirs.float() if delta is None else theirs.add_(delta).float(), None
    )
    assert ours.equal(theirs)
    torch.testing.assert_close(out.float(), expected, rtol=RTOL[dtype], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_gate(shape: tuple[int, int, int, torch.dtype]) -> None:
    rows, size, seed, dtype = shape
    gate_up = random(rows, 2 * size, seed, dtype, scale=20.0)
    function = NativeKernels(dtype)._silu_and_mul
    out = NativeGatedLinear(lambda x: x, function)(gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.double(), expected, rtol=RTOL[dtype], atol=1e-30)


def test_extreme_values_stay_what_they_are() -> None:
    infinity, nan = float("inf"), float("nan")
    gate = torch.tensor([infinity, -infinity, nan, 200.0, -200.0, 0.0, -0.0])
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    out = NativeGatedLinear(lambda x: x, NativeKernels(torch.float32)._silu_and_mul)(gate_up)[0]
    assert out[0] == infinity
    assert out[2].isnan()
    assert out[3] == 200.0
    assert out[4:].abs().max() < 1e-30
    poisoned = torch.ones(3, 32)
    poisoned[1, 5] = nan
    out = NativeKernels(torch.float32).add_norm(torch.ones(32), 1e-5)(poisoned, None)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_what_a_norm_would_misread_is_refused() -> None:
    kernels = NativeKernels(torch.float32)
    for weight in (torch.ones(2, 32), torch.ones(32, dtype=torch.float16), torch.ones(32, device="meta")):
        with pytest.raises(ValueError, match="no norm has a weight of"):
            kernels.add_norm(weight, 1e-5)
    norm, rows = kernels.add_norm(torch.ones(32), 1e-5), torch.ones(3, 32)
    for residual in (
        torch.ones(3, 31),
        torch.ones(32),
        rows.bfloat16(),
        torch.ones(32, 3).T,
        torch.ones(3, 64)[:, ::2],
    ):
        with pytest.raises(ValueError, match=r"the residual is .* for a norm of torch.float32 \[32\]"):
            norm(residual, None)
    for delta in (torch.ones(2, 32), torch.ones(1, 32), rows.double(), torch.ones(32, 3).T):
        with pytest.raises(ValueError, match=r"to a residual of torch.float32 \[3, 32\] .* cannot be added"):
            norm(rows, delta)
    assert rows.equal(torch.ones(3, 32))


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        NativeKernels(torch.float16)


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        library().set_num_threads(0)


def test_two_python_threads_may_compute_at_once() -> None:
    kernel = NativeKernels(torch.float32).add_norm(torch.ones(600), 1e-5)
    inputs = [random(64, 600, seed, torch.float32) for seed in range(8)]
    expected = [kernel(x.clone(), None) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            found = list(pool.map(lambda x: kernel(x.clone(), None), inputs))
            assert all(ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True))
