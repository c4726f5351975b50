"""The decoder that all families of this room share; they differ by `ModelConfig` alone.

It holds one rank's share of the weights and computes whole hidden states on every rank: two sums over the
ranks a layer, one for the embedding. It does not know requests, sampling or where its rows come from.
"""

from dataclasses import dataclass
from typing import Any

import torch

from workers.attention.base import AttentionBackend
from workers.attention.metadata import AttentionMetadata
from workers.kernels.base import AddNorm, Kernels, Product
from workers.layers import RowParallelLinear, VocabEmbedding
from workers.model_config import ModelConfig
from workers.partition import Partition, even_slice, partition
from workers.rope import HeadNorms, cos_sin_table
from workers.tensor_parallel import TensorParallel
from workers.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Queries, keys and values are one product, as are gate and up."""

    attention_norm: AddNorm
    qkv: Product
    head_norms: HeadNorms | None
    attention_out: Product
    ffn_norm: AddNorm
    gate_up: Product
    down: Product
    window: int | None


class DecoderModel:
    """A loaded model. Sizes named num_*_heads are this rank's, all others the whole model's."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        tp: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
        backend: AttentionBackend,
        kernels: Kernels,
    ) -> None:
        """Raises ValueError for a group size that cannot split the model, and for a wrong checkpoint."""
        self.config = config
        self.partition = partition(
            tp.rank, tp.size, config.num_query_heads, config.num_kv_heads, config.ffn_size, config.vocab_size
        )
        self.vocab_size = config.vocab_size
        self.vocab_shard_sizes = [len(even_slice(config.vocab_size, rank, tp.size)) for rank in range(tp.size)]
        self.num_layers = config.num_layers
        self.num_query_heads = len(self.partition.query_heads)
        self.num_kv_heads = len(self.partition.kv_heads)
        self.head_dim = config.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        self._backend = backend
        self._scale = config.head_dim**-0.5
        reader = _LayerReader(config, self.partition, checkpoint, tp, device, dtype, kernels)
        self._embedding = reader.embedding()
        self._layers = [reader.layer(i) for i in range(config.num_layers)]
        self._norm = reader.norm("model.norm.weight")
        self._head = reader.head(self._embedding)
        self._rope = cos_sin_table(config.rope, config.head_dim, config.max_position_embeddings, dtype).to(device)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """input_ids and positions [num_tokens] int64 -> hidden states after the final norm [num_tokens, hidden].

        Writes the rows' keys and values into `kv_caches` (one a layer) and attends to all that precede them.
        """
        cos_sin = self._rope.index_select(0, positions)
        steps = {window: self._backend.prepare(metadata, kv_caches[0], window) for window in set(self.config.windows)}
        residual, delta = self._embedding(input_ids), None
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x = layer.attention_norm(residual, delta)
            delta = layer.attention_out(self._attend(layer, layer.qkv(x), cos_sin, kv_cache, steps[layer.window]))
            x = layer.ffn_norm(residual, delta)
            delta = layer.down(layer.gate_up(x))
        return self._norm(residual, delta)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> this rank's logits [rows, len(partition.vocab)], in the model's dtype."""
        return self._head(hidden)

    def _attend(
        self, layer: DecoderLayer, qkv: torch.Tensor, cos_sin: torch.Tensor, kv_cache: torch.Tensor, step: Any
    ) -> torch.Tensor:
        q = self._backend.rotate_and_write(qkv, cos_sin, layer.head_norms, self.num_query_heads, kv_cache, step)
        return self._backend.attend(q, kv_cache, step, self._scale).flatten(1)


class _LayerReader:
    """Reads this rank's slices, under the names that Hugging Face transformers gives them."""

    def __init__(
        self,
        config: ModelConfig,
        share: Partition,
        checkpoint: Checkpoint,
        tp: TensorParallel,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self._config = config
        self._share = share
        self._checkpoint = checkpoint
        self._tp = tp
        self._device = device
        self._dtype = dtype
        self._kernels = kernels
        self._query_rows = _scaled(share.query_heads, config.head_dim)
        self._kv_rows = _scaled(share.kv_heads, config.head_dim)

    def embedding(self) -> VocabEmbedding:
        shape = (self._config.vocab_size, self._config.hidden_size)
        weight = self._read("model.embed_tokens.weight", shape, rows=self._share.vocab)
        return VocabEmbedding(weight, self._share.vocab.start, self._tp)

    def head(self, embedding: VocabEmbedding) -> Product:
        if self._config.tie_embeddings:
            return self._kernels.linear(embedding.weight)
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._kernels.linear(self._read("lm_head.weight", shape, rows=self._share.vocab))

    def norm(self, name: str) -> AddNorm:
        return self._kernels.add_norm(self._read(name, (self._config.hidden_size,)), self._config.rms_norm_eps)

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        query_size, kv_size = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = [
            (attention + "q_proj", query_size, self._query_rows),
            (attention + "k_proj", kv_size, self._kv_rows),
            (attention + "v_proj", kv_size, self._kv_rows),
        ]
        gate_up = [(mlp + name, config.ffn_size, self._share.ffn) for name in ("gate_proj", "up_proj")]
        return DecoderLayer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            qkv=self._kernels.linear(*self._merged(qkv, config.qkv_bias)),
            head_norms=self._head_norms(attention) if config.qk_norm else None,
            attention_out=self._row_parallel(attention + "o_proj", query_size, self._query_rows, config.output_bias),
            ffn_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            gate_up=self._kernels.gated_linear(*self._merged(gate_up, config.mlp_bias)),
            down=self._row_parallel(mlp + "down_proj", config.ffn_size, self._share.ffn, config.mlp_bias),
            window=config.windows[index],
        )

    def _head_norms(self, attention: str) -> HeadNorms:
        size = (self._config.head_dim,)
        return HeadNorms(
            self._read(attention + "q_norm.weight", size),
            self._read(attention + "k_norm.weight", size),
            self._config.rms_norm_eps,
        )

    def _merged(self, parts: list[tuple[str, int, range]], bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One product for several projections of the same input: (name, whole output size, this rank's rows) each."""
        hidden = self._config.hidden_size
        weight = torch.cat([self._read(f"{name}.weight", (size, hidden), rows=rows) for name, size, rows in parts])
        if not bias:
            return weight, None
        return weight, torch.cat([self._read(f"{name}.bias", (size,), rows=rows) for name, size, rows in parts])

    def _row_parallel(self, name: str, size: int, columns: range, bias: bool) -> Product:
        hidden = self._config.hidden_size
        weight = self._read(f"{name}.weight", (hidden, size), columns=columns)
        whole_bias = self._read(f"{name}.bias", (hidden,)) if bias else None
        if self._tp.size == 1:
            return self._kernels.linear(weight, whole_bias)
        return RowParallelLinear(self._kernels.linear(weight), whole_bias, self._tp)

    def _read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        part = self._checkpoint.read(name, shape, rows, columns)
        # Always a copy: a slice is a view that would keep the whole tensor, or the mapped file, alive.
        return part.to(self._device, self._dtype, copy=True, memory_format=torch.contiguous_format)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
