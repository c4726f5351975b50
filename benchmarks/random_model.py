"""A Llama checkpoint of any size with random weights: speed does not depend on their values."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast


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
SERVED = LlamaShape(64, 160, 2, 4, 2, 259)
"""As many tokens as a tokenizer of bytes has."""
SLOW = LlamaShape(256, 640, 6, 8, 4, 259)
"""The same, some ten times as slow."""


def write_served_model(path: Path, shape: LlamaShape = SERVED) -> None:
    """A float32 model with a tokenizer of bytes, whose logits lie far apart: what `chunkserve serve` can load."""
    write_model(shape, path, torch.float32, scale=0.3)
    alphabet = sorted(ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


def write_model(shape: LlamaShape, path: Path, dtype: torch.dtype, scale: float = 0.02) -> int:
    """Write `config.json` and `model.safetensors`; the bytes of all weights. `scale` is their standard deviation."""
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
    weights = {name: _random(size, dtype, scale) for name, size in tensor_shapes(shape).items()}
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


def _random(size: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (scale * torch.randn(size, device=device)).to(dtype).cpu()
