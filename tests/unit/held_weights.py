"""The weights that a model of plain torch kernels holds, by name."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from workers.models import DecoderModel


def held_weights(model: DecoderModel) -> dict[str, torch.Tensor]:
    """Every tensor of its parts; a head tied to the embedding is not listed twice."""
    named = {"embedding": model._embedding.weight, "norm": model._norm.weight}
    if model._head.weight is not model._embedding.weight:
        named["head"] = model._head.weight
    for index, layer in enumerate(model._layers):
        named.update(_tensors(f"layers.{index}", layer))
    return named


def _tensors(name: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
    elif is_dataclass(part):
        for field in fields(part):
            # A layer whose input is spread over ranks is called as the one it becomes on a single rank.
            inner = name if field.name == "product" else f"{name}.{field.name}"
            yield from _tensors(inner, getattr(part, field.name))
