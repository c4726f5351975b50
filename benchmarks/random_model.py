"""A Llama checkpoint of any size with random weights: speed does not depend on their values."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """As in a Llama `config.json`; the head is the embedding."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype.itemsize


ONE_BILLION = LlamaShape(2048, 8192, 16, 32, 8, 128256)
TINY = LlamaShape(64, 160, 2, 4, 2, 300)


def write_model(shape: LlamaShape, path: Path, dtype: torch.dtype) -> int:
    """Write `config.json` and `model.safetensors`; the bytes of all weights."""
    config = asdict(shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weights = {name: _random(size, dtype) for name, size in tensor_shapes(shape).items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() * weight.itemsize for weight in weights.values())


def tensor_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    kv = shape.num_key_value_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes


def _random(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (0.02 * torch.randn(size, device=device)).to(dtype).cpu()
