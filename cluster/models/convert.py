"""Convert a GGUF file into a Hugging Face directory: `python -m cluster.models.convert FILE DIRECTORY`.

Runs as a process of its own, so that a launcher neither imports torch nor keeps the memory. Weights are dequantised
and saved as bfloat16 safetensors, beside the configuration, the tokenizer and its chat template.
"""

import sys
from pathlib import Path


def convert(gguf: Path, directory: Path) -> None:
    """Write the model into `directory`, which exists and is empty."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    options = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=options
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
