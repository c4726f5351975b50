"""The packed linear layers against float64, for any shape; and what a row gives alone and in a batch, to the bit."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_ways import WAYS, multiplying_by

from workers.kernels.library import library
from workers.kernels.linear import PackedGatedLinear, PackedLinear

SHAPES = {"size": st.integers(1, 200), "out": st.integers(1, 200), "rows": st.integers(1, 300)}
SEEDS = st.integers(0, 2**32 - 1)
SUM_ERROR = 2.0**-22
"""Of one addition in float32, relative to the sum of all magnitudes; several roundings are made for each pair."""
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}
"""Of a result, relative."""
TINY = 1e-30
"""What lies below may be taken for zero."""


Draw = Callable[..., torch.Tensor]
"""(generator, *shape) -> a random tensor."""


def _bfloat16(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def _float32(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _float32_of_bfloat16(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return _bfloat16(generator, *shape).float()


@pytest.fixture(
    autouse=True,
    scope="module",
    params=[*((way, _bfloat16) for way in WAYS), ("vectors", _float32), ("vectors", _float32_of_bfloat16)],
    ids=lambda param: f"{param[1].__name__[1:]} by {param[0]}",
)
def draw(request: pytest.FixtureRequest) -> Iterator[Draw]:
    """What the layers are made of, and how they are multiplied."""
    way, drawn = request.param
    with multiplying_by(way):
        yield drawn


@pytest.fixture(autouse=True, params=[1, 3], ids="threads={}".format)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    library().set_num_threads(request.param)
    yield
    library().set_num_threads(1)


def _product(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x W^T in float64, and how far a sum in float32 may lie from it."""
    x, weight = x.double(), weight.double()
    return x @ weight.T, SUM_ERROR * (x.shape[1] + 2) * (x.abs() @ weight.T.abs()) + TINY


def _assert_near(result: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> None:
    assert result.is_contiguous()
    distance = (result.double() - expected).abs()
    assert bool((distance <= error + ROUNDING[result.dtype] * (expected.abs() + error)).all()), distance.max()


@settings(deadline=None, max_examples=40)
@given(**SHAPES, with_bias=st.booleans(), seed=SEEDS)
def test_linear_is_the_product_and_the_bias(
    draw: Draw, size: int, out: int, rows: int, with_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = draw(generator, rows, size), draw(generator, out, size)
    bias = draw(generator, out) if with_bias else None
    expected, error = _product(x, weight)
    if bias is not None:
        expected = expected + bias.double()
        error = error + SUM_ERROR * expected.abs()
    _assert_near(PackedLinear(weight, bias)(x), expected, error)


@settings(deadline=None, max_examples=40)
@given(**SHAPES, seed=SEEDS)
def test_gated_linear_is_silu_of_gate_times_up(draw: Draw, size: int, out: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, gate, up = draw(generator, rows, size), draw(generator, out, size), draw(generator, out, size)
    (g, g_error), (u, u_error) = _product(x, gate), _product(x, up)
    activated = torch.nn.functional.silu(g)
    # The slope of silu is nowhere above 1.1.
    a_error = 1.1 * g_error + 2.0**-20 * activated.abs() + TINY
    error = a_error * (u.abs() + u_error) + activated.abs() * u_error
    _assert_near(PackedGatedLinear(gate, up)(x), activated * u, error)


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 700), out=st.integers(1, 150), rows=st.integers(1, 100), gated=st.booleans(), seed=SEEDS)
def test_a_row_gives_the_same_alone_and_in_any_batch(
    draw: Draw, size: int, out: int, rows: int, gated: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = draw(generator, rows, size), draw(generator, out, size)
    layer = PackedGatedLinear(weight, draw(generator, out, size)) if gated else PackedLinear(weight)
    together = layer(x)
    library().set_num_threads(2)
    for row in range(rows):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


@settings(deadline=None, max_examples=20)
@given(size=st.integers(1, 100), before=st.integers(0, 5), after=st.integers(0, 5), rows=st.integers(1, 20), seed=SEEDS)
def test_rows_may_lie_apart_and_what_is_between_them_is_not_read(
    draw: Draw, size: int, before: int, after: int, rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = draw(generator, rows, size), draw(generator, 40, size)
    wide = torch.full((rows, before + size + after), float("nan"), dtype=x.dtype)
    view = wide[:, before : before + size]
    view.copy_(x)
    assert torch.equal(PackedLinear(weight)(view), PackedLinear(weight)(x))


def test_what_is_not_a_number_or_too_large_stays_in_its_row_and_column(draw: Draw) -> None:
    generator = torch.Generator()
    x, weight = draw(generator, 8, 33).fill_(1), draw(generator, 70, 33).fill_(1)
    x[3, 5], weight[20, 7] = float("nan"), float("inf")
    result = PackedLinear(weight)(x)
    assert bool(result[3].isnan().all())
    assert bool((result[:3, 20] == float("inf")).all())
    result[3], result[:, 20] = 33, 33
    assert bool((result == 33).all())


def test_no_rows_give_no_rows() -> None:
    layer = PackedLinear(torch.ones(5, 4, dtype=torch.bfloat16))
    assert layer(torch.empty(0, 4, dtype=torch.bfloat16)).shape == (0, 5)


def test_later_changes_of_weight_and_bias_are_not_seen() -> None:
    weight, bias = torch.ones(5, 4, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)
    layer = PackedLinear(weight, bias)
    weight.zero_()
    bias.zero_()
    assert layer(torch.ones(1, 4, dtype=torch.bfloat16)).tolist() == [[5.0] * 5]


def test_transposed_weights_are_packed_by_value(draw: Draw) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = draw(generator, 3, 20), draw(generator, 50, 20)
    transposed = weight.T.contiguous().T
    assert torch.equal(PackedLinear(transposed)(x), PackedLinear(weight)(x))
    assert torch.equal(PackedGatedLinear(transposed, transposed)(x), PackedGatedLinear(weight, weight)(x))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 5, dtype=torch.bfloat16),
        torch.ones(2, 4),
        torch.ones(4, 2, dtype=torch.bfloat16).T,
    ],
    ids=["size", "dtype", "columns apart"],
)
def test_input_that_would_be_misread_is_refused(x: torch.Tensor) -> None:
    weight = torch.ones(5, 4, dtype=torch.bfloat16)
    for layer in (PackedLinear(weight), PackedGatedLinear(weight, weight)):
        with pytest.raises(ValueError, match="inputs"):
            layer(x)


def test_weights_that_do_not_fit_are_refused() -> None:
    weight = torch.ones(5, 4, dtype=torch.bfloat16)
    for wrong in (weight.half(), weight[0], weight[:0]):
        with pytest.raises(ValueError, match="cannot pack"):
            PackedLinear(wrong)
    bias = torch.ones(5, dtype=torch.bfloat16)
    for wrong in (bias[:4], bias.float(), bias.to("meta")):
        with pytest.raises(ValueError, match="bias"):
            PackedLinear(weight, wrong)
    for up in (weight[:4], weight.float()):
        with pytest.raises(ValueError, match="up"):
            PackedGatedLinear(weight, up)


def test_weights_that_are_bfloat16_without_loss_are_packed_as_that() -> None:
    weight = torch.ones(64, 64)
    nearly = weight.clone()
    nearly[3, 4] += 2.0**-20
    half = PackedLinear(weight).nbytes
    assert PackedLinear(nearly).nbytes == 2 * half
    assert PackedGatedLinear(weight, nearly).nbytes == 4 * half
    assert PackedGatedLinear(weight, weight).nbytes == 2 * half
