"""Llama 2 and 3, and what copies them (SmolLM2)."""

from collections.abc import Mapping
from typing import Any

from workers.model_config import ModelConfig, parse_decoder


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From `config.json`. Raises KeyError or ValueError naming what is missing or unsupported."""
    bias = bool(raw.get("attention_bias", False))
    return parse_decoder(
        raw,
        default_max_positions=2048,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )
