"""A tiny random model with a real tokenizer and chat template, as `chunkserve serve` can load it."""

from pathlib import Path

import transformers
from api_fakes import EOS, TOKENIZER, VOCAB
from tiny_models import save_model

MAX_MODEL_LEN = 4096


def write_served_model(directory: Path) -> Path:
    """Random weights: what it says has no meaning, but how it says it is the real thing."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    save_model(config, directory)
    TOKENIZER._tokenizer.save_pretrained(directory)
    return directory
