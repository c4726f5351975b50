"""The shape of a Llama-family decoder, and how to read it from a checkpoint's `config.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workers.rope import RopeConfig, parse_rope

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything in which the families of the one decoder differ."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence the model is made for, its RoPE scaling included, in tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer: keys a query sees, its own included (sliding window); None: all."""
    tie_embeddings: bool
    """The head is the embedding."""
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each query and key head, before RoPE."""
    dtype: torch.dtype
    """The checkpoint's own."""

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Ends of tensor names that may stay unread: RoPE tables of old checkpoints, the copy of a tied head."""
        return ("rotary_emb.inv_freq", *(("lm_head.weight",) if self.tie_embeddings else ()))


def parse_decoder(
    raw: Mapping[str, Any],
    *,
    default_max_positions: int,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    window_of: Callable[[int], int | None] = lambda layer: None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """What all families read alike; a default is the one of the family's Hugging Face config class.

    Raises KeyError for a missing key and ValueError for an unsupported value.
    """
    if raw.get("quantization_config"):
        raise ValueError("quantization_config is set; quantized checkpoints are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; supported is 'silu'")
    hidden_size, num_query_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    num_layers = int(raw["num_hidden_layers"])
    num_kv_heads = int(raw.get("num_key_value_heads") or default_kv_heads or num_query_heads)
    if num_query_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads {num_query_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    max_positions = int(raw.get("max_position_embeddings") or default_max_positions)
    head_dim = int(raw.get("head_dim") or default_head_dim or hidden_size // num_query_heads)
    rope = parse_rope(raw, max_positions)
    return ModelConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        ffn_size=int(raw["intermediate_size"]),
        num_layers=num_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions,
        rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
        rope=rope,
        windows=tuple(window_of(layer) for layer in range(num_layers)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=_parse_dtype(raw),
    )


def layer_windows(raw: Mapping[str, Any]) -> Callable[[int], int | None]:
    """Qwen's rule: if `use_sliding_window`, the layers `layer_types` names, or those from `max_window_layers` on."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    layer_types = raw.get("layer_types")
    first = raw.get("max_window_layers", 28)

    def window_of(layer: int) -> int | None:
        slides = layer_types[layer] == "sliding_attention" if layer_types else layer >= first
        return window if slides else None

    return window_of


def _parse_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ValueError(f"dtype is {name!r}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]
