"""Rotary position embedding and its scaling variants, as Hugging Face transformers computes them.

Every angle is a function of the position alone, so that keys in the cache stay valid whatever the chunking.
Dynamic NTK is defined by the length of the sequence so far: a key is rotated as when it was the newest token.
That is what transformers does while it decodes; a prompt beyond the trained length differs from it there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE parameters; those of other variants keep their defaults."""

    rope_type: RopeType
    theta: float
    max_positions: int
    """Longest sequence, scaling included."""
    factor: float = 1.0
    original_max_positions: int = 0
    """Trained length that the scaling extends."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Of cos and sin (yarn)."""
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query head and every key head before they are rotated (Qwen3); weights [head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def parse_rope(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises KeyError for a missing parameter and ValueError for an unsupported variant.
    """
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in _TYPES:
        raise ValueError(f"rope_type is {rope_type!r}; supported are {', '.join(_TYPES)}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ValueError("rope_parameters differ between layer types, which is not supported")
    if (scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is set; only whole heads can be rotated")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope_type == "default":
        return RopeConfig("default", theta, max_position_embeddings)
    original = int(scaling.get("original_max_position_embeddings") or max_position_embeddings)
    factor = scaling.get("factor")
    if factor is None and rope_type == "yarn":
        factor = max_position_embeddings / original
    factor = float(scaling["factor"] if factor is None else factor)
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            max_position_embeddings,
            factor,
            original,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
        )
    if rope_type == "yarn":
        return RopeConfig(
            "yarn",
            theta,
            max(max_position_embeddings, int(original * factor)),
            factor,
            original,
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
            attention_factor=_yarn_attention_factor(scaling, factor),
            truncate=bool(scaling.get("truncate", True)),
        )
    # linear and dynamic: the config states the trained length
    return RopeConfig(rope_type, theta, int(max_position_embeddings * factor), factor, max_position_embeddings)


def cos_sin_table(config: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_positions, 2, head_dim]: cosines, and sines whose first half is negated (see `apply_rope`)."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    if config.rope_type == "dynamic":
        angles = positions[:, None] * _dynamic_frequencies(config, head_dim, positions)
    else:
        angles = torch.outer(positions, inverse_frequencies(config, head_dim))
    cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
    table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)
    return table.to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [num_tokens, num_heads, head_dim] by cos and sin [num_tokens, 1, head_dim].

    Dimension i pairs with i + head_dim / 2 (the Hugging Face layout): x * cos + swap_halves(x) * sin,
    where the sign of the pair's first member lies in `sin`.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def norm_and_rotate(
    qkv: torch.Tensor, cos_sin: torch.Tensor, norms: HeadNorms | None, num_query_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [num_tokens, heads, head_dim] of qkv, where they lie side by side in each row.

    Queries and keys are normed where the model does that, and rotated by the rows cos_sin [num_tokens, 2, head_dim]
    of `cos_sin_table`. May overwrite qkv.
    """
    heads = qkv.view(qkv.shape[0], num_query_heads + 2 * num_kv_heads, -1)
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None:
        size = (qk.shape[-1],)
        q = F.rms_norm(qk[:, :num_query_heads], size, norms.q_weight, norms.eps)
        k = F.rms_norm(qk[:, num_query_heads:], size, norms.k_weight, norms.eps)
        qk = torch.cat((q, k), dim=1)
    cos, sin = cos_sin.unsqueeze(2).unbind(1)
    qk = apply_rope(qk, cos, sin)
    return qk[:, :num_query_heads], qk[:, num_query_heads:], v


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] radians a position, float32, for every variant but "dynamic"."""
    plain = 1.0 / config.theta ** _exponents(head_dim)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, plain)
    if config.rope_type == "yarn":
        return _yarn(config, plain, head_dim)
    return plain


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _dynamic_frequencies(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """[num_positions, head_dim / 2]; the base grows with the sequence once it is longer than the trained length."""
    length = (positions + 1).clamp(min=config.original_max_positions)
    growth = config.factor * length / config.original_max_positions - (config.factor - 1)
    base = config.theta * growth ** (head_dim / (head_dim - 2))
    return 1.0 / base[:, None] ** _exponents(head_dim)


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    blend = (config.original_max_positions / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): interpolate dimensions that turn less than beta_slow times over the trained
    length, keep those that turn more than beta_fast times, blend linearly between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(config.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / config.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
