"""Attention backends on a CUDA device against naive float64 attention (helpers: tests/unit on PYTHONPATH)."""

from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# A chunk with context, decodes, a first chunk, and a decode with two drafts.
QUERY_LENS, CONTEXTS = [200, 1, 1, 128, 3], [300, 700, 31, 0, 64]


def largest_error(backend_name: str, dtype: torch.dtype, window: int | None, block_size: int) -> float:
    from dense_attention import largest_error as measure

    from workers.attention import select_backend

    backend = select_backend(backend_name, torch.device("cuda"), dtype, 64)
    return measure(
        backend,
        QUERY_LENS,
        CONTEXTS,
        query_heads=9,
        kv_heads=3,
        head_dim=64,
        block_size=block_size,
        window=window,
        dtype=dtype,
        device="cuda",
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_torch_backend(dtype: torch.dtype, bound: float, window: int | None) -> None:
    assert largest_error("torch", dtype, window, 16) < bound


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash-attn")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_flash_backend(dtype: torch.dtype, bound: float, window: int | None) -> None:
    assert largest_error("flash", dtype, window, 256) < bound
