"""One rank: its device, its slices of the model, its KV cache and its mirror. Executes plans.

The same class runs under the Ray shell, in process and under plain processes in tests.
"""

import logging
import platform
import socket
import time
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist

from scheduler.plan import StepLoad, StepPlan, StepResult
from workers import rehearsal
from workers.attention import AttentionBackend, select_backend
from workers.config import ModelLimits, WorkerConfig
from workers.device import available_cores, select_device, select_dtype
from workers.kernels.selection import select_kernels, set_kernel_threads
from workers.kv_cache import allocate_kv_caches, block_bytes
from workers.model_runner import ModelRunner, PendingStep
from workers.models import DecoderModel, load_model, read_model_config
from workers.partition import partition
from workers.profile import profile_rank
from workers.request_state import RequestState
from workers.stage_clock import StageClock
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards

logger = logging.getLogger(__name__)


class Worker:
    """Call `load`, `measure`, `allocate`, then execute plans. All but `collect_step` and `shutdown` are collective:
    every rank of the group must make the same call, and waits `rendezvous_seconds` for the others.
    """

    _tp: TensorParallel
    _backend: AttentionBackend
    _model: DecoderModel
    _runner: ModelRunner
    _state: RequestState

    def __init__(
        self,
        config: WorkerConfig,
        rank: int = 0,
        rendezvous: str | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """`rendezvous`: "tcp://host:port" on rank 0's node, None only for a group of one. `listener`: rank 0's
        socket, if it listens there already.
        """
        if not 0 <= rank < config.tensor_parallel_size:
            raise ValueError(f"rank is {rank}; tensor_parallel_size is {config.tensor_parallel_size}")
        if rendezvous is None and config.tensor_parallel_size > 1:
            raise ValueError(f"rank {rank} of {config.tensor_parallel_size} needs a rendezvous")
        self._config = config
        self._rank = rank
        self._rendezvous = rendezvous
        self._listener = listener
        self._connected = False
        self.clock: StageClock | None = None
        """Where time goes, once `allocate` was called with `profile_steps`."""

    def load(self) -> None:
        """Take the device, meet the other ranks, read this rank's slices of the weights.

        Raises FileNotFoundError or ValueError for a model or setting that cannot work, RuntimeError when
        the ranks do not come together.
        """
        config = self._config
        self._device = select_device(config.device, self._rank)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        model_config = read_model_config(config.model_path)
        self._dtype = select_dtype(config.dtype, self._device, model_config.dtype)
        self._backend = select_backend(
            config.attention_backend,
            self._device,
            self._dtype,
            model_config.head_dim,
            config.block_size,
            -(-model_config.num_query_heads // max(model_config.num_kv_heads, config.tensor_parallel_size)),
        )
        partition(  # refuses a group size that cannot split the model, before anybody waits for anybody
            self._rank,
            config.tensor_parallel_size,
            model_config.num_query_heads,
            model_config.num_kv_heads,
            model_config.ffn_size,
            model_config.vocab_size,
        )
        self._tp = self._connect()
        kernels = select_kernels(self._device, self._dtype)
        if self._device.type == "cpu":
            # Where torch computes neither products nor attention, its threads would only be in the way of ours.
            torch_computes = not kernels.has_products or self._backend.name != "native"
            torch.set_num_threads(self._num_threads() if torch_computes else 1)
            set_kernel_threads(self._num_threads())
        started = time.perf_counter()
        self._model = load_model(config.model_path, self._tp, self._device, self._dtype, self._backend, kernels)
        self._shards = VocabShards(self._tp, self._model.vocab_shard_sizes)
        logger.info(
            "rank %d of %d: weights in %.1f s, %s on %s, %d threads, attention %s, kernels %s",
            self._rank, config.tensor_parallel_size, time.perf_counter() - started,
            self._dtype, self._device, self._num_threads(), self._backend.name, kernels.name,
        )  # fmt: skip

    def measure(self) -> ModelLimits:
        """What this rank could hold. The group must agree on the smallest of each number.

        Raises ValueError, naming both values, when max_model_len is set above what the model or the KV
        cache holds, and when there is no room for a single block.
        """
        config, model = self._config, self._model
        block_size = config.block_size or self._backend.block_size
        self._backend.kv_cache_shape(1, block_size, model.num_kv_heads, model.head_dim)  # refuses a wrong size
        if config.max_model_len > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {config.max_model_len}; the model holds {model.max_position_embeddings} tokens"
            )
        num_blocks = config.num_blocks or self._affordable_blocks(block_size)
        capacity = num_blocks * block_size
        if config.max_model_len > capacity:
            raise ValueError(
                f"max_model_len is {config.max_model_len}; the KV cache holds {capacity} tokens"
                f" ({num_blocks} blocks of {block_size})"
            )
        max_model_len = config.max_model_len or min(model.max_position_embeddings, capacity)
        dtype = str(self._dtype).removeprefix("torch.")
        return ModelLimits(num_blocks, block_size, max_model_len, model.vocab_size, dtype, self._backend.name)

    def allocate(self, limits: ModelLimits) -> None:
        """Take the KV cache and the mirror that the group agreed on, and run small steps once."""
        config = self._config
        state = RequestState(
            config.max_num_seqs, limits.max_model_len, limits.block_size, self._device, limits.num_blocks
        )
        self._runner = self._runner_over(state, limits.num_blocks)
        self._state = state
        plans = rehearsal.small_steps(
            limits.num_blocks,
            limits.block_size,
            config.max_num_batched_tokens,
            config.max_num_seqs,
            limits.max_model_len,
        )
        for plan in plans:
            self.execute_step(plan)
        state.clear()
        if config.profile_steps:
            self.clock = profile_rank(self._model, self._backend, self._tp, self._runner, self._device)

    def profile(self, limits: ModelLimits) -> list[tuple[StepLoad, float]]:
        """Run a few steps of several sizes before any real one: what each computes, and its seconds."""
        config = self._config
        plans = rehearsal.profile_steps(
            limits.num_blocks,
            limits.block_size,
            config.max_num_batched_tokens,
            config.max_num_seqs,
            limits.max_model_len,
        )
        profile = [(load, self.execute_step(plan).execute_seconds) for plan, load in plans]
        self._state.clear()
        if self.clock is not None:
            self.clock.take()
        return profile

    def execute_step(self, plan: StepPlan) -> StepResult:
        """Run a plan to its result. Raises PlanError when it contradicts the plans before it."""
        return self._runner.collect(self.launch_step(plan))

    def launch_step(self, plan: StepPlan) -> PendingStep:
        """Queue a plan's work on the device without waiting for it: the first half of `execute_step`."""
        if self._tp.size == 1:
            return self._runner.launch(plan)
        before = self._tp.stats().seconds
        pending = self._runner.launch(plan)
        return replace(pending, collective_seconds=self._tp.stats().seconds - before)

    def collect_step(self, pending: PendingStep) -> StepResult:
        """Wait for a launched step's result, in the order of the launches: the second half."""
        result = self._runner.collect(pending)
        return result if self.clock is None else replace(result, stage_seconds=self.clock.take())

    def shutdown(self) -> None:
        """Leave the group. The worker is of no use afterwards; calling it again does nothing."""
        if self._connected:
            self._connected = False
            self._tp.close()

    def _connect(self) -> TensorParallel:
        config = self._config
        if self._rendezvous is None:
            return TensorParallel(device=self._device)
        tp = TensorParallel.connect(
            self._rank,
            config.tensor_parallel_size,
            self._rendezvous,
            self._device,
            config.rendezvous_seconds,
            self._listener,
        )
        self._connected = True
        return tp

    def _num_threads(self) -> int:
        """Of a CPU rank: its share of the cores there are."""
        return self._config.num_threads or max(1, available_cores() // self._ranks_on_this_node)

    @cached_property
    def _ranks_on_this_node(self) -> int:
        if self._tp.size == 1:
            return 1
        names = [""] * self._tp.size
        dist.all_gather_object(names, platform.node())
        return names.count(platform.node())

    def _runner_over(self, state: RequestState, num_blocks: int) -> ModelRunner:
        model = self._model
        kv_caches = allocate_kv_caches(
            self._backend,
            model.num_layers,
            num_blocks,
            state.block_size,
            model.num_kv_heads,
            model.head_dim,
            self._dtype,
            self._device,
        )
        return ModelRunner(model, kv_caches, state, self._shards)

    def _affordable_blocks(self, block_size: int) -> int:
        model = self._model
        one_block = block_bytes(model.num_layers, model.num_kv_heads, model.head_dim, block_size, self._dtype)
        if self._device.type == "cuda":
            budget, source = self._free_gpu_memory(block_size, one_block), "gpu_memory_utilization leaves"
        else:
            # The budget is the group's. Every rank holds the same blocks, if not the same bytes of each.
            one_block = self._tp.total(one_block)
            budget, source = self._config.kv_memory_bytes, "kv_memory_bytes is"
        if budget < one_block:
            raise ValueError(f"{source} {budget} bytes; one KV block of {block_size} tokens takes {one_block}")
        return budget // one_block

    def _free_gpu_memory(self, block_size: int, one_block: int) -> int:
        """Bytes left for KV: the share of the GPU that may be used, less what is in use at the peak of a full step."""
        config, device = self._config, self._device
        longest = config.max_model_len or self._model.max_position_embeddings
        lengths = rehearsal.spread(config.max_num_batched_tokens, config.max_num_seqs, longest - 1)
        torch.cuda.reset_peak_memory_stats(device)
        state = RequestState(config.max_num_seqs, longest, block_size, device)  # as large as the one to come
        num_blocks = rehearsal.blocks_for(lengths, block_size)
        runner = self._runner_over(state, num_blocks)
        runner.collect(runner.launch(rehearsal.full_step(lengths, block_size)))
        peak = torch.cuda.max_memory_allocated(device) - num_blocks * one_block
        del runner, state
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        outside_torch = total - free - torch.cuda.memory_reserved(device)  # driver, collectives, other processes
        return int(total * config.gpu_memory_utilization) - outside_torch - peak
