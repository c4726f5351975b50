"""Qwen3 (dense): Llama with an RMS norm on each query and key head, and a head size of its own."""

from collections.abc import Mapping
from typing import Any

from workers.model_config import ModelConfig, layer_windows, parse_decoder


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From `config.json`. Raises KeyError or ValueError naming what is missing or unsupported."""
    bias = bool(raw.get("attention_bias", False))
    return parse_decoder(
        raw,
        default_max_positions=32768,
        default_head_dim=128,
        window_of=layer_windows(raw),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
