"""The decoder against Hugging Face transformers in float32: whole prompts, and chunks mixed with decodes."""

import subprocess
import sys

import pytest
import torch
import transformers
from held_weights import held_weights
from paged_batches import chunked_logits
from tiny_models import KINDS, VOCAB_SIZE, reference_greedy, reference_logits, save_model, tiny_model

from workers.attention import AttentionBackend, select_backend
from workers.kernels.base import Kernels
from workers.kernels.native import NativeKernels
from workers.kernels.torch_kernels import TorchKernels
from workers.models import DecoderModel, load_model, read_model_config
from workers.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(5)
LENGTHS = [100, 47, 130]
SEQUENCES = [torch.randint(VOCAB_SIZE, (n,), generator=GENERATOR).tolist() for n in LENGTHS]
WHOLE = [[n] for n in LENGTHS]
MIXED = [[30, 1, 1, 60, 8], [5, 5, 20, 1, 1, 1, 14], [64, 64, 2]]
LEAVES = ("torch", "native")
SINGLES = [[1] * 30, [20] + [1] * 27, [1] * 40]


def load(path: str, leaf: str, dtype: torch.dtype = torch.float32) -> tuple[DecoderModel, AttentionBackend]:
    kernels: Kernels = NativeKernels(dtype) if leaf == "native" else TorchKernels()
    backend = select_backend(leaf, CPU, dtype, read_model_config(path).head_dim)
    return load_model(path, TensorParallel(), CPU, dtype, backend, kernels), backend


def assert_equals_reference(path: str, chunks: list[list[int]], leaf: str, block_size: int = 16) -> None:
    sequences = [sequence[: sum(c)] for sequence, c in zip(SEQUENCES, chunks, strict=False)]
    model, backend = load(path, leaf)
    found = chunked_logits(model, TensorParallel(), backend, sequences, chunks, block_size)
    for sequence, ours in zip(SEQUENCES, found, strict=False):
        difference = float((ours - reference_logits(path, sequence[: len(ours)])).abs().max())
        assert difference < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("leaf", "block_size"), [("torch", 16), ("torch", 5), ("native", 16), ("native", 32)])
@pytest.mark.parametrize("chunks", [WHOLE, MIXED, SINGLES], ids=["whole", "mixed", "one"])
def test_logits_equal_the_reference(kind: str, chunks: list[list[int]], leaf: str, block_size: int) -> None:
    assert_equals_reference(tiny_model(kind), chunks, leaf, block_size)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False,
         "beta_fast": 20, "mscale": 1.2, "mscale_all_dim": 0.7},
        {"rope_type": "dynamic", "factor": 3.0},
    ],
    ids=["linear", "yarn", "yarn-mscale", "dynamic"],
)  # fmt: skip
def test_rope_variants_equal_the_reference(rope: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("rope")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    save_model(config, path)
    assert_equals_reference(str(path), MIXED[:2], "native")


@pytest.mark.parametrize("biased", [transformers.LlamaConfig, transformers.Qwen3Config])
def test_biases_equal_the_reference(
    biased: type[transformers.PreTrainedConfig], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("biased")
    config = biased(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        attention_bias=True,
        **({"mlp_bias": True} if biased is transformers.LlamaConfig else {}),
    )
    save_model(config, path)
    for leaf in LEAVES:
        assert_equals_reference(str(path), MIXED, leaf)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_weight_or_window_would_show(kind: str) -> None:
    """The comparison's own proof: logits move by far more than its tolerance when one norm weight does."""
    model, backend = load(tiny_model(kind), "torch")
    before = chunked_logits(model, TensorParallel(), backend, SEQUENCES[:1], WHOLE[:1])[0]
    held_weights(model)["layers.0.attention_norm.weight"][0] += 0.5
    after = chunked_logits(model, TensorParallel(), backend, SEQUENCES[:1], WHOLE[:1])[0]
    assert float((before - after).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_have_no_near_ties(kind: str) -> None:
    _, lead = reference_greedy(tiny_model(kind), SEQUENCES[0][:20], 12)
    assert lead > 1e-3


@pytest.mark.parametrize("leaf", LEAVES)
def test_bfloat16_stays_near_the_reference(leaf: str) -> None:
    path = tiny_model("smollm2")
    model, backend = load(path, leaf, torch.bfloat16)
    ours = chunked_logits(model, TensorParallel(), backend, SEQUENCES[:1], MIXED[:1], dtype=torch.bfloat16)[0]
    assert ours.dtype == torch.bfloat16
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        their_logits = theirs(torch.tensor([SEQUENCES[0]])).logits[0]
    exact = reference_logits(path, SEQUENCES[0])
    our_error, their_error = (float((logits.float() - exact).abs().mean()) for logits in (ours, their_logits))
    assert our_error <= 1.25 * their_error


def test_a_model_runs_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['ray'] = None\n"
        "import torch\n"
        "from workers.models import load_model\n"
        "from workers.attention import select_backend\n"
        "from workers.kernels.selection import select_kernels\n"
        "from workers.tensor_parallel import TensorParallel\n"
        "cpu = torch.device('cpu')\n"
        f"m = load_model({tiny_model('qwen3')!r}, TensorParallel(), cpu, torch.float32,"
        " select_backend('auto', cpu, torch.float32, 16), select_kernels(cpu, torch.float32))\n"
        "print(m.num_layers, m.num_kv_heads, m.head_dim, m.vocab_size, m.max_position_embeddings)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["2", "3", "16", "301", "512"]
