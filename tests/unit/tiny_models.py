"""Tiny random-weight models in Hugging Face format, made on the fly, and their float32 reference.

Head counts let tensor parallelism of 1, 2 and 3 work, evenly or not; vocabulary and feed-forward sizes never
divide evenly by both. Every weight, norms and biases included, is random and large enough that a wrong one shows
and that logits are not near-ties.
"""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 301
KINDS = ("llama", "mistral", "qwen2", "qwen3", "smollm2")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 130,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_HEADS_6_3 = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


def _config(kind: str) -> transformers.PreTrainedConfig:
    if kind == "llama":
        return transformers.LlamaConfig(**_COMMON, **_HEADS_6_3, rope_parameters=_LLAMA3_ROPE)
    if kind == "mistral":  # one KV head: every rank of a group shares it
        heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1}
        return transformers.MistralConfig(**_COMMON, **heads, sliding_window=24)
    if kind == "qwen2":
        return transformers.Qwen2Config(**_COMMON, **_HEADS_6_3)
    if kind == "qwen3":  # heads wider than hidden_size / num_attention_heads; a window on the upper layer
        heads = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
        return transformers.Qwen3Config(
            **_COMMON, **heads, use_sliding_window=True, sliding_window=40, max_window_layers=1
        )
    if kind == "smollm2":
        heads = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
        return transformers.LlamaConfig(**_COMMON | {"num_hidden_layers": 3}, **heads, tie_word_embeddings=True)
    raise ValueError(f"kind is {kind!r}; there are {', '.join(KINDS)}")


@cache
def _root() -> Path:
    root = tempfile.mkdtemp(prefix="chunkserve-tiny-models-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


@cache
def tiny_model(kind: str, dtype: torch.dtype = torch.float32) -> str:
    """Folder of a tiny model of a kind in KINDS; made once a process, removed at its end."""
    path = _root() / f"{kind}-{dtype}".replace("torch.", "")
    save_model(_config(kind), path, dtype)
    return str(path)


def save_model(config: transformers.PreTrainedConfig, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """A model of this configuration with random weights, always the same ones."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    model.to(dtype).save_pretrained(path)


@cache
def reference(path: str) -> transformers.PreTrainedModel:
    """The Hugging Face model in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference_logits(path: str, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position of one sequence, [len(token_ids), vocab] float32."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(path)(torch.tensor([token_ids])).logits[0]
    return logits


def reference_greedy(path: str, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Greedy continuation without regard to eos, and the smallest lead of a chosen token's logit over the next."""
    tokens, lead = list(prompt), float("inf")
    for _ in range(num_tokens):
        best = reference_logits(path, tokens)[-1].topk(2)
        tokens.append(int(best.indices[0]))
        lead = min(lead, float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], lead
