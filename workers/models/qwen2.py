"""Qwen2 and 2.5: Llama with a bias on query, key and value; sliding windows on upper layers if switched on."""

from collections.abc import Mapping
from typing import Any

from workers.model_config import ModelConfig, layer_windows, parse_decoder


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From `config.json`. Raises KeyError or ValueError naming what is missing or unsupported."""
    return parse_decoder(
        raw,
        default_max_positions=32768,
        window_of=layer_windows(raw),
        qkv_bias=True,
    )
