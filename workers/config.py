"""Settings of one rank: the same object for every rank of a group."""

from dataclasses import dataclass, field
from typing import Literal

from scheduler.plan import StepLoad

Dtype = Literal["auto", "bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker needs to load a model and size its KV cache. `model_path` is a local directory."""

    model_path: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 0
    """0: what the model and the KV cache both hold."""
    dtype: Dtype = "auto"
    """auto: the checkpoint's on a GPU; on a CPU bfloat16 where the processor has it, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = 1
    block_size: int = 0
    """Tokens a KV block holds; 0: the attention backend's choice (16 where it has none)."""
    num_blocks: int = 0
    """0: measured (free GPU memory) or bought with `kv_memory_bytes` (CPU)."""
    kv_memory_bytes: int = 2 << 30
    """KV budget of the whole group on CPU, in bytes."""
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "auto"
    num_threads: int = 0
    """Compute threads of a CPU rank; 0: its share of the machine's cores."""
    rendezvous_seconds: float = 60.0
    """Deadline of torch.distributed's rendezvous and of each collective."""
    profile_steps: bool = False
    """Time the stages of each step; slower by a hundredth on a CPU, by much on a GPU."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What start-up measured; equal on every rank (num_blocks is the minimum over ranks)."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    dtype: str = field(default="", compare=False)
    """Of weights, activations and KV; for logs, as is what follows."""
    attention_backend: str = field(default="", compare=False)
    profile: tuple[tuple[StepLoad, float], ...] = field(default=(), compare=False)
    """What a few steps took on rank 0, in seconds."""
