"""The decoder that all families of this room share; they differ by `ModelConfig` alone.

It holds one rank's share of the weights and computes whole hidden states on every rank: two sums over the
ranks a layer, one for the embedding. It does not know requests, sampling or where its rows come from.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workers.attention.base import AttentionBackend
from workers.attention.metadata import AttentionMetadata
from workers.layers import Linear, RMSNorm, RowParallelLinear, VocabEmbedding, silu_and_mul
from workers.model_config import ModelConfig
from workers.partition import Partition, even_slice, partition
from workers.rope import apply_rope, cos_sin_table
from workers.tensor_parallel import TensorParallel
from workers.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Queries, keys and values are one product, as are gate and up."""

    attention_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    attention_out: RowParallelLinear
    ffn_norm: RMSNorm
    gate_up: Linear
    down: RowParallelLinear
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
        reader = _LayerReader(config, self.partition, checkpoint, tp, device, dtype)
        self._embedding = reader.embedding()
        self._layers = [reader.layer(i) for i in range(config.num_layers)]
        self._norm = reader.norm("model.norm.weight", config.hidden_size)
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
        cos, sin = self._rope.index_select(0, positions).unsqueeze(2).unbind(1)  # [num_tokens, 1, head_dim] each
        steps = {window: self._backend.prepare(metadata, kv_caches[0], window) for window in set(self.config.windows)}
        residual = self._embedding(input_ids)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            attended = self._attend(layer, layer.attention_norm(residual), cos, sin, kv_cache, steps[layer.window])
            residual = residual + attended
            residual = residual + layer.down(silu_and_mul(layer.gate_up(layer.ffn_norm(residual))))
        return self._norm(residual)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> this rank's logits [rows, len(partition.vocab)], in the model's dtype."""
        return F.linear(hidden, self._head)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every tensor this rank holds, by name; a head tied to the embedding is not listed twice."""
        named: dict[str, torch.Tensor] = {"embedding": self._embedding.weight, "norm": self._norm.weight}
        if self._head is not self._embedding.weight:
            named["head"] = self._head
        for i, layer in enumerate(self._layers):
            for part in ("attention_norm", "qkv", "q_norm", "k_norm", "attention_out", "ffn_norm", "gate_up", "down"):
                module = getattr(layer, part)
                for kind in ("weight", "bias"):
                    if (tensor := getattr(module, kind, None)) is not None:
                        named[f"layers.{i}.{part}.{kind}"] = tensor
        return named

    def _attend(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        step: Any,
    ) -> torch.Tensor:
        num_q, num_kv = self.num_query_heads, self.num_kv_heads
        heads = layer.qkv(x).view(-1, num_q + 2 * num_kv, self.head_dim)
        qk, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, :num_q]), layer.k_norm(qk[:, num_q:])), dim=1)
        qk = apply_rope(qk, cos, sin)
        self._backend.write_kv(qk[:, num_q:], v, kv_cache, step)
        out = self._backend.attend(qk[:, :num_q], kv_cache, step, self._scale)
        return layer.attention_out(out.reshape(-1, num_q * self.head_dim))


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
    ) -> None:
        self._config = config
        self._share = share
        self._checkpoint = checkpoint
        self._tp = tp
        self._device = device
        self._dtype = dtype
        self._query_rows = _scaled(share.query_heads, config.head_dim)
        self._kv_rows = _scaled(share.kv_heads, config.head_dim)

    def embedding(self) -> VocabEmbedding:
        shape = (self._config.vocab_size, self._config.hidden_size)
        weight = self._read("model.embed_tokens.weight", shape, rows=self._share.vocab)
        return VocabEmbedding(weight, self._share.vocab.start, self._tp)

    def head(self, embedding: VocabEmbedding) -> torch.Tensor:
        if self._config.tie_embeddings:
            return embedding.weight
        return self._read("lm_head.weight", (self._config.vocab_size, self._config.hidden_size), rows=self._share.vocab)

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._read(name, (size,)), self._config.rms_norm_eps)

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
            attention_norm=self.norm(prefix + "input_layernorm.weight", config.hidden_size),
            qkv=self._merged(qkv, config.qkv_bias),
            q_norm=self.norm(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self.norm(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
            attention_out=self._row_parallel(attention + "o_proj", query_size, self._query_rows, config.output_bias),
            ffn_norm=self.norm(prefix + "post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._merged(gate_up, config.mlp_bias),
            down=self._row_parallel(mlp + "down_proj", config.ffn_size, self._share.ffn, config.mlp_bias),
            window=config.windows[index],
        )

    def _merged(self, parts: list[tuple[str, int, range]], bias: bool) -> Linear:
        """One product for several projections of the same input: (name, whole output size, this rank's rows) each."""
        hidden = self._config.hidden_size
        weight = torch.cat([self._read(f"{name}.weight", (size, hidden), rows=rows) for name, size, rows in parts])
        if not bias:
            return Linear(weight)
        return Linear(weight, torch.cat([self._read(f"{name}.bias", (size,), rows=rows) for name, size, rows in parts]))

    def _row_parallel(self, name: str, size: int, columns: range, bias: bool) -> RowParallelLinear:
        hidden = self._config.hidden_size
        weight = self._read(f"{name}.weight", (hidden, size), columns=columns)
        return RowParallelLinear(weight, self._read(f"{name}.bias", (hidden,)) if bias else None, self._tp)

    def _read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        part = self._checkpoint.read(name, shape, rows, columns)
        # Always a copy: a slice is a view that would keep the whole tensor, or the mapped file, alive.
        return part.to(self._device, self._dtype, copy=True, memory_format=torch.contiguous_format)


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
