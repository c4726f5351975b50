"""Model families behind one lazy registry, keyed by the checkpoint's architecture name."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workers.attention.base import AttentionBackend
from workers.kernels.base import Kernels
from workers.model_config import ModelConfig
from workers.models.decoder import DecoderModel
from workers.tensor_parallel import TensorParallel
from workers.weights import Checkpoint

__all__ = ["DecoderModel", "ModelConfig", "load_model", "read_model_config"]

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_model_config(model_path: str) -> ModelConfig:
    """The model's shape from `config.json` alone.

    Raises FileNotFoundError, or ValueError naming what is unknown, missing or unsupported in it.
    """
    path = Path(model_path) / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    names = raw.get("architectures") or []
    family = next((_FAMILIES[name] for name in names if name in _FAMILIES), None)
    if family is None:
        raise ValueError(f"{path}: architectures is {names}; supported are {', '.join(_FAMILIES)}")
    parse: Callable[[dict[str, Any]], ModelConfig] = importlib.import_module(f"workers.models.{family}").parse_config
    try:
        return parse(raw)
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_model(
    model_path: str,
    tp: TensorParallel,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend,
    kernels: Kernels,
) -> DecoderModel:
    """This rank's share of the model in a local directory, in `dtype` on `device`.

    Raises FileNotFoundError or ValueError naming what is missing, unexpected or unsupported.
    """
    config = read_model_config(model_path)
    with Checkpoint(model_path) as checkpoint:
        model = DecoderModel(config, checkpoint, tp, device, dtype, backend, kernels)
        checkpoint.refuse_unread(config.ignored_tensors)
    return model
