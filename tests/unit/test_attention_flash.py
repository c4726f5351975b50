"""The FlashAttention leaf over a fake package: the arguments it passes, read as the real kernel reads them."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from dense_attention import dense_attention, largest_error

from workers.attention import select_backend

CUDA = torch.device("cuda")


class FakeFlashAttention(ModuleType):
    """Has the varlen call of FlashAttention 2.8, over keys and values [num_blocks, block_size, kv_heads, dim]."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert block_table is not None
        assert softmax_scale is not None
        assert block_table.dtype == cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert k.shape[1] % 256 == 0
        self.calls.append({"causal": causal, "window_size": window_size, "max": (max_seqlen_q, max_seqlen_k)})
        out = []
        for i, rows in enumerate(q.split(cu_seqlens_q.diff().tolist())):
            tokens = int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])
            keys, values = (x[block_table[i].long()].flatten(0, 1)[:tokens] for x in (k, v))
            window = None if window_size == (-1, -1) else window_size[0] + 1
            out.append(dense_attention(rows, keys, values, softmax_scale, window))
        return torch.cat(out).to(q.dtype)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttention:
    fake = FakeFlashAttention()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    return fake


@pytest.mark.parametrize(("window", "expected"), [(None, (-1, -1)), (100, (99, 0))])
def test_one_causal_call_reads_the_paged_cache(
    package: FakeFlashAttention, window: int | None, expected: tuple[int, int]
) -> None:
    backend = select_backend("auto", CUDA, torch.float16, 16)
    assert (backend.name, backend.block_size) == ("flash", 256)
    error = largest_error(
        backend,
        [20, 1, 7],
        [300, 513, 0],
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        block_size=256,
        window=window,
        dtype=torch.float16,
    )
    assert error < 2e-3
    assert package.calls == [{"causal": True, "window_size": expected, "max": (20, 514)}]


def test_a_block_size_it_cannot_page_is_refused(package: FakeFlashAttention) -> None:
    backend = select_backend("flash", CUDA, torch.bfloat16, 128)
    assert backend.kv_cache_shape(4, 512, 2, 128) == (2, 4, 512, 2, 128)
    with pytest.raises(ValueError, match=r"block_size is 16; .* needs a multiple of 256"):
        backend.kv_cache_shape(4, 16, 2, 128)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "missing"),
    [
        ("cpu", torch.bfloat16, 64, "needs a CUDA device; this one is cpu"),
        ("cuda", torch.float32, 64, "needs float16 or bfloat16; the dtype is torch.float32"),
        ("cuda", torch.bfloat16, 288, "head_dim of a multiple of 8 up to 256, not 288"),
        ("cuda", torch.bfloat16, 60, "head_dim of a multiple of 8 up to 256, not 60"),
    ],
)
def test_what_it_cannot_run_on_is_named(
    package: FakeFlashAttention, device: str, dtype: torch.dtype, head_dim: int, missing: str
) -> None:
    with pytest.raises(ValueError, match=missing):
        select_backend("flash", torch.device(device), dtype, head_dim)
    assert select_backend("auto", torch.device(device), dtype, head_dim).name != "flash"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match="needs the package flash-attn"):
        select_backend("flash", CUDA, torch.bfloat16, 64)
    assert select_backend("auto", CUDA, torch.bfloat16, 64).name == "torch"
