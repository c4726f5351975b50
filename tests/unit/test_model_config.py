import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workers.models import read_model_config
from workers.rope import cos_sin_table, inverse_frequencies, parse_rope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def parse(tmp_path: Path, **changes: Any) -> Any:
    raw = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_model_config(str(tmp_path))


def test_an_old_llama_config_and_its_defaults(tmp_path: Path) -> None:
    config = parse(tmp_path, torch_dtype="float16")
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (32, 128, 2048)
    assert (config.rope.rope_type, config.rope.theta, config.dtype) == ("default", 10000.0, torch.float16)
    assert config.windows == (None,) * 32
    biases = (config.qkv_bias, config.output_bias, config.mlp_bias)
    assert not any((*biases, config.tie_embeddings, config.qk_norm))


def test_what_the_families_differ_in(tmp_path: Path) -> None:
    mistral = parse(tmp_path, architectures=["MistralForCausalLM"])
    assert (mistral.num_kv_heads, mistral.windows[0]) == (8, 4096)
    assert parse(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).windows[0] is None
    qwen2 = parse(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=4096, max_window_layers=30)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.windows[31]) == (True, False, None)
    sliding = {"use_sliding_window": True, "sliding_window": 64}
    qwen2 = parse(tmp_path, architectures=["Qwen2ForCausalLM"], max_window_layers=30, **sliding)
    assert qwen2.windows == (None,) * 30 + (64,) * 2
    types = ["sliding_attention"] + ["full_attention"] * 31
    qwen3 = parse(tmp_path, architectures=["Qwen3ForCausalLM"], layer_types=types, **sliding)
    assert qwen3.windows == (64,) + (None,) * 31
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]; supported are Llama"),
        ({"architectures": ...}, r"architectures is \[\]"),
        ({"hidden_size": ...}, "'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints are not supported"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'; supported are default,"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layer types"),
    ],
)
def test_what_is_unsupported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(tmp_path, **changes)
    assert str(tmp_path) in str(caught.value)


def test_no_config_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_model_config(str(tmp_path))


ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 0.9,
     "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 2048, "mscale": 0.707,
     "mscale_all_dim": 1.3},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling", "type"])
def test_frequencies_equal_transformers(rope: dict[str, Any], style: str) -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 5e5, **rope},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    raw: dict[str, Any] = {"rope_parameters": {"rope_theta": 5e5, **rope}}
    if style != "rope_parameters":
        raw = {"rope_theta": 5e5, "rope_scaling": dict(rope)}
    if style == "type":
        raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    ours = parse_rope(raw, 8192)
    torch.testing.assert_close(inverse_frequencies(ours, 64), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor)


def test_the_longest_sequence_includes_the_scaling() -> None:
    def longest(**scaling: Any) -> int:
        return parse_rope({"rope_scaling": scaling}, 4096).max_positions

    assert longest(rope_type="linear", factor=4.0) == longest(rope_type="dynamic", factor=4.0) == 16384
    assert longest(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096) == 16384
    assert longest(rope_type="llama3", factor=8.0, low_freq_factor=1, high_freq_factor=4) == 4096
    assert longest(rope_type="default") == 4096


def test_dynamic_angles_are_those_of_a_sequence_that_ends_there() -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    table = cos_sin_table(parse_rope(theirs.to_dict(), 64), 64, 128, torch.float32)
    for position in (0, 63, 64, 100, 127):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, seq_len=position + 1)
        torch.testing.assert_close(table[position, 0, :32], (position * frequencies).cos(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(table[position, 1, 32:], (position * frequencies).sin(), rtol=1e-5, atol=1e-5)


def test_saved_configs_are_read_back() -> None:
    config = read_model_config(tiny_model("llama"))
    assert (config.rope.rope_type, config.rope.factor, config.rope.original_max_positions) == ("llama3", 4.0, 64)
    assert read_model_config(tiny_model("mistral")).windows == (24, 24)
    assert read_model_config(tiny_model("qwen3")).windows == (None, 40)
    assert read_model_config(tiny_model("smollm2")).tie_embeddings
    assert read_model_config(tiny_model("qwen2", torch.bfloat16)).dtype == torch.bfloat16
