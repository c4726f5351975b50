"""Mistral: Llama with a sliding window over every layer (none if `sliding_window` is null)."""

from collections.abc import Mapping
from typing import Any

from workers.model_config import ModelConfig, parse_decoder


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """From `config.json`. Raises KeyError or ValueError naming what is missing or unsupported."""
    window = raw.get("sliding_window", 4096)
    return parse_decoder(
        raw,
        default_max_positions=131072,
        default_kv_heads=8,
        window_of=lambda layer: window,
    )
