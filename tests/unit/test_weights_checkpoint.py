"""What is read from a checkpoint, what is refused, and how many bytes each rank holds."""

import shutil
from pathlib import Path

import pytest
import torch
from held_weights import held_weights
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, reference, tiny_model

from workers.attention.torch_backend import TorchAttention
from workers.kernels.torch_kernels import TorchKernels
from workers.kv_cache import allocate_kv_caches, block_bytes
from workers.models import DecoderModel, load_model
from workers.partition import partition
from workers.tensor_parallel import TensorParallel
from workers.weights import Checkpoint

CPU = torch.device("cpu")


def load(path: str | Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """One rank's share; loading needs no other rank."""
    return load_model(str(path), TensorParallel(rank, size), CPU, dtype, TorchAttention(), TorchKernels())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("smollm2"), tmp_path / "model"))


def rewrite(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors of a single-file checkpoint; "__" stands for a dot."""
    held = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, path / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_holds_its_slices_and_no_more(kind: str, size: int) -> None:
    ranks = [load(tiny_model(kind), rank, size) for rank in range(size)]
    whole = load(tiny_model(kind))
    c = whole.config
    for rank, model in enumerate(ranks):
        share = partition(rank, size, c.num_query_heads, c.num_kv_heads, c.ffn_size, c.vocab_size)
        query, kv = len(share.query_heads) * c.head_dim, len(share.kv_heads) * c.head_dim
        layer = c.hidden_size * (2 * query + 2 * kv + 3 * len(share.ffn))
        layer += (query + 2 * kv) * c.qkv_bias + 2 * c.head_dim * c.qk_norm + 2 * c.hidden_size
        vocab = len(share.vocab) * c.hidden_size * (1 if c.tie_embeddings else 2)
        weights = held_weights(model)
        assert sum(w.nbytes for w in weights.values()) == 4 * (c.num_layers * layer + vocab + c.hidden_size)
        # No view keeps a larger tensor alive.
        assert sum(w.untyped_storage().nbytes() for w in weights.values()) == sum(w.nbytes for w in weights.values())
        if size > 1:
            for name, full in held_weights(whole).items():
                assert full.dim() == 1 or weights[name].numel() < full.numel(), f"rank {rank} holds all of {name}"


def test_one_rank_holds_every_parameter_once() -> None:
    for kind in KINDS:
        parameters = reference(tiny_model(kind)).parameters()
        held = held_weights(load(tiny_model(kind))).values()
        assert sum(w.numel() for w in held) == sum(p.numel() for p in parameters)


def test_shards_named_by_an_index_equal_the_single_file(tmp_path: Path) -> None:
    reference(tiny_model("qwen2")).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    single, sharded = (held_weights(load(path, 1, 2)) for path in (tiny_model("qwen2"), tmp_path))
    assert single.keys() == sharded.keys()
    assert all(single[name].equal(sharded[name]) for name in single)
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).unlink()
    with pytest.raises(FileNotFoundError, match="model-00001-of"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_become_the_wanted_dtype(stored: torch.dtype, wanted: torch.dtype) -> None:
    weights = held_weights(load(tiny_model("smollm2", stored), dtype=wanted))
    original = load_file(Path(tiny_model("smollm2", stored)) / "model.safetensors")
    assert weights["embedding"].dtype == wanted
    assert weights["embedding"].equal(original["model.embed_tokens.weight"].to(wanted))


def test_a_missing_tensor_is_named(copy: Path) -> None:
    rewrite(copy, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(copy)


def test_unexpected_tensors_are_named(copy: Path) -> None:
    rewrite(copy, model__layers__0__self_attn__q_proj__bias=torch.zeros(144), extra=torch.zeros(1))
    with pytest.raises(ValueError, match=r"unexpected tensors .*: extra, model\.layers\.0\.self_attn\.q_proj\.bias$"):
        load(copy)


def test_a_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    rewrite(copy, model__norm__weight=torch.ones(143))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(143,\); config\.json says \(144,\)"):
        load(copy)


def test_old_rope_tables_and_the_copy_of_a_tied_head_are_ignored(copy: Path) -> None:
    rewrite(
        copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4), lm_head__weight=torch.zeros(301, 144)
    )
    assert "head" not in held_weights(load(copy))


def test_a_folder_without_weights_is_named(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        load(copy)


def test_a_truncated_file_is_named(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or no safetensors file"):
        load(copy)


@pytest.mark.parametrize("text", ["{", "{}"])
def test_an_index_without_a_map_is_named(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json holds no weight_map"):
        load(copy)


def test_a_config_that_is_not_json_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("<html>")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load(copy)


def test_tensors_outlive_the_checkpoint_and_slices_are_exact() -> None:
    path = tiny_model("llama")
    with Checkpoint(path) as checkpoint:
        part = checkpoint.read("model.layers.0.mlp.down_proj.weight", (96, 130), range(3, 7), range(100, 130))
    whole = load_file(Path(path) / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert part.equal(whole[3:7, 100:130])


def test_a_refused_group_size_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="nearest sizes that work: 3 or 6"):
        load(tiny_model("llama"), 0, 4)


def test_kv_caches_take_the_bytes_they_are_said_to_and_are_zero() -> None:
    caches = allocate_kv_caches(TorchAttention(), 3, 10, 16, 2, 8, torch.bfloat16, CPU)
    assert sum(cache.nbytes for cache in caches) == 10 * block_bytes(3, 2, 8, 16, torch.bfloat16)
    assert len(caches) == 3
    assert not any(cache.any() for cache in caches)
    # SmolLM2-135M in bfloat16: 23,040 bytes a token.
    assert block_bytes(30, 3, 64, 1, torch.bfloat16) == 23040
