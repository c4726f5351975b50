"""The settings tree of one service: typed, checked, and never written after it is built.

Every setting has one default and one parser here. Settings that default to "auto" depend on the device or on what
start-up measures. `cluster.settings.source` reads the tree from a file and the command line; nothing else builds it.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from cluster.autoscaling.policy import AutoscalingOptions
from cluster.engine.settings import EngineSettings, Placement, SchedulerOptions
from cluster.errors import ConfigError
from cluster.frontend.settings import FrontendSettings
from cluster.settings.values import (
    Parser,
    boolean,
    choice,
    integer,
    number,
    text,
    unset_or,
)
from scheduler.config import SchedulingPolicy
from workers.config import Dtype, ModelLimits, WorkerConfig

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
APP_NAME = "chunkserve"
"""Of the Serve application, and of whose metrics actor its parts report to."""
GIB = 1 << 30
RouterName = Literal["predicted", "power_of_two"]


@dataclass(frozen=True, slots=True)
class Device:
    """What the service computes on. `memory_gib` is one GPU's, 0 where unknown or without a GPU."""

    kind: Literal["cpu", "cuda"] = "cpu"
    memory_gib: float = 0.0

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "no GPU"
        return f"GPU of {self.memory_gib:.0f} GiB" if self.memory_gib else "GPU"


def _setting(default: Any, parse: Parser, *, unset: str = "") -> Any:
    """A field with its parser; `unset` is the word that stands for None where None is a value."""
    parser = unset_or(parse, unset) if unset else parse
    return field(default=default, metadata={"parse": parser, "unset": unset})


@dataclass(frozen=True, slots=True)
class ModelSettings:
    path: str = _setting(DEFAULT_MODEL, text)
    """A local directory or a hub id."""
    name: str | None = _setting(None, text, unset="auto")
    """The name clients ask for; None: the hub id, or the directory's name."""
    device: Literal["cpu", "cuda"] | None = _setting(None, choice("cpu", "cuda"), unset="auto")
    """None: a GPU if the machine has one on which the application is built."""
    dtype: Dtype = _setting("auto", choice("auto", "bfloat16", "float16", "float32"))
    max_len: int | None = _setting(None, integer(2), unset="auto")
    """None: what the model and the KV cache both hold."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = _setting("127.0.0.1", text)
    port: int = _setting(8000, integer(1, 65535))
    num_frontends: int = _setting(1, integer(1, 256))
    api_key: str | None = _setting(None, text, unset="none")
    api_key_file: str | None = _setting(None, text, unset="none")
    max_body_mb: float = _setting(16.0, number(0, 1024, above=True))
    max_queue_seconds: float | None = _setting(None, number(0, above=True), unset="none")
    drain_seconds: float = _setting(30.0, number(0, 86400))
    profile_steps: bool = _setting(False, boolean)


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    tensor_parallel_size: int = _setting(1, integer(1, 1024))
    placement: Placement = _setting("pack", choice("pack", "spread"))
    num_replicas: int = _setting(1, integer(1, 1024))
    router: RouterName = _setting("predicted", choice("predicted", "power_of_two"))
    """Who chooses the engine of a request."""


@dataclass(frozen=True, slots=True)
class AutoscalingSettings:
    """Engines by load, in place of a fixed `parallel.num_replicas`."""

    min_replicas: int = _setting(1, integer(0, 1024))
    """0: the last engine goes when nothing is open, and the next request starts one."""
    max_replicas: int = _setting(0, integer(0, 1024))
    """0: off."""
    target_queue_seconds: float = _setting(2.0, number(0, above=True))
    target_kv_usage: float = _setting(0.8, number(0, 1, above=True))
    up_seconds: float = _setting(10.0, number(0, 86400))
    down_seconds: float = _setting(300.0, number(0, 86400))
    wake_seconds: float = _setting(300.0, number(0, 86400, above=True))
    """With no engine left: how long a request waits for one to load."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    max_num_batched_tokens: int | None = _setting(None, integer(1), unset="auto")
    """None: by device, 256 without a GPU, 2,048 on a GPU, 8,192 on one of 70 GiB or more."""
    max_num_seqs: int | None = _setting(None, integer(1), unset="auto")
    """None: 256, 32 without a GPU."""
    long_prefill_token_threshold: int = _setting(0, integer(0))
    max_num_partial_prefills: int = _setting(1, integer(1))
    max_long_partial_prefills: int = _setting(1, integer(1))
    enable_chunked_prefill: bool = _setting(True, boolean)
    policy: SchedulingPolicy = _setting("fcfs", choice("fcfs", "priority"))
    overlap_depth: int = _setting(2, integer(1, 2))
    itl_slo_ms: float | None = _setting(None, number(0, above=True), unset="none")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    block_size: int | None = _setting(None, integer(1, 4096), unset="auto")
    """None: the attention backend's, 16 where it has no wish."""
    num_blocks: int | None = _setting(None, integer(1), unset="auto")
    """None: measured at start-up."""
    memory_gb: float = _setting(2.0, number(0, above=True))
    """KV cache of one engine without a GPU."""
    gpu_memory_utilization: float = _setting(0.9, number(0, 1, above=True))
    enable_prefix_caching: bool = _setting(True, boolean)


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    backend: str = _setting("auto", choice("auto", "torch", "native", "flash"))


@dataclass(frozen=True, slots=True)
class BatchSettings:
    directory: str | None = _setting(None, text, unset="none")
    """Of uploaded files and batches; None: no /v1/files and no /v1/batches."""
    max_file_mb: float = _setting(200.0, number(0, above=True))


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole tree. Build it with `cluster.settings.source.resolve`, which also fills what the device decides."""

    model: ModelSettings = field(default_factory=ModelSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    autoscaling: AutoscalingSettings = field(default_factory=AutoscalingSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)

    @property
    def most_replicas(self) -> int:
        """Most engines that there may be."""
        return self.autoscaling.max_replicas or self.parallel.num_replicas

    @property
    def least_replicas(self) -> int:
        """Engines that a start needs: one also where it may go later."""
        return max(1, self.autoscaling.min_replicas) if self.autoscaling.max_replicas else self.parallel.num_replicas

    @property
    def served_name(self) -> str:
        """The model's name for clients: `model.name`, else the hub id or the directory's name."""
        if self.model.name is not None:
            return self.model.name
        path = self.model.path.rstrip("/")
        is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
        return path if is_hub_id else path.rsplit("/", 1)[-1]


SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "server": ServerSettings,
    "parallel": ParallelSettings,
    "autoscaling": AutoscalingSettings,
    "scheduler": SchedulerSettings,
    "cache": CacheSettings,
    "attention": AttentionSettings,
    "batch": BatchSettings,
}

_FIELDS = {f"{section}.{item.name}": item for section, kind in SECTIONS.items() for item in fields(kind)}

PARSERS: dict[str, Parser] = {name: item.metadata["parse"] for name, item in _FIELDS.items()}
"""Every setting's full name and its parser, in the order they are printed."""

UNSET_WORDS: dict[str, str] = {name: item.metadata["unset"] for name, item in _FIELDS.items()}
"""How None is written where it is a value, "auto" or "none"."""

SECRET_SETTINGS = frozenset({"server.api_key"})

_NOT_SUPPORTED_YET = ("scheduler.itl_slo_ms",)


def device_defaults(device: Device) -> dict[str, int]:
    """Starting points by device and use; no GPU is sized for small models on a few cores."""
    if device.kind == "cpu":
        return {"scheduler.max_num_batched_tokens": 256, "scheduler.max_num_seqs": 32}
    budget = 8192 if device.memory_gib >= 70 else 2048
    return {"scheduler.max_num_batched_tokens": budget, "scheduler.max_num_seqs": 256}


def value_of(settings: Settings, name: str) -> Any:
    """The value of a setting by its full name."""
    section, _, leaf = name.partition(".")
    return getattr(getattr(settings, section), leaf)


def check(settings: Settings) -> None:
    """Refuse contradictions before anything starts. Raises ConfigError naming the values."""
    for name in _NOT_SUPPORTED_YET:
        if value_of(settings, name) is not None:
            raise ConfigError(f"{name} is not supported yet; leave it unset")
    _check_replicas(settings)
    if settings.batch.directory is not None and settings.scheduler.policy != "priority":
        raise ConfigError("batch.directory needs scheduler.policy=priority: batches must not delay other requests")
    max_len = settings.model.max_len
    # Where the limit on lengths is the model's, what depends on it is checked again when the engine knows it.
    engine = engine_settings(settings, settings.model.path, Device())
    known = ModelLimits(
        num_blocks=1, block_size=settings.cache.block_size or 16, max_model_len=max_len or 1, vocab_size=1
    )
    try:
        engine.scheduler_config(known)
    except ValueError as error:
        raise ConfigError(f"scheduler: {error}") from error
    cache = settings.cache
    if max_len and cache.num_blocks and cache.block_size and max_len > cache.num_blocks * cache.block_size:
        raise ConfigError(
            f"model.max_len ({max_len}) is above cache.num_blocks * cache.block_size"
            f" ({cache.num_blocks} * {cache.block_size} = {cache.num_blocks * cache.block_size}):"
            " one sequence of that length must fit the KV cache"
        )


def _check_replicas(settings: Settings) -> None:
    scaling, fixed = settings.autoscaling, settings.parallel.num_replicas
    low, high = scaling.min_replicas, scaling.max_replicas
    if high and low > high:
        raise ConfigError(f"autoscaling.min_replicas ({low}) is above autoscaling.max_replicas ({high})")
    if high and fixed != 1:
        raise ConfigError(
            f"parallel.num_replicas ({fixed}) is a fixed number of engines and autoscaling.max_replicas ({high}) asks"
            " for a varying one; leave one of them unset"
        )


def autoscaling_options(settings: Settings) -> AutoscalingOptions | None:
    """The policy's share of the tree; None when the number of engines is fixed."""
    scaling = settings.autoscaling
    if not scaling.max_replicas:
        return None
    return AutoscalingOptions(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        target_queue_seconds=scaling.target_queue_seconds,
        target_kv_usage=scaling.target_kv_usage,
        up_seconds=scaling.up_seconds,
        down_seconds=scaling.down_seconds,
    )


def engine_settings(settings: Settings, model_path: str, device: Device) -> EngineSettings:
    """The engines' share of the tree. `model_path` is the local directory that `model.path` was resolved to."""
    cache, options = settings.cache, settings.scheduler
    worker = WorkerConfig(
        model_path=model_path,
        max_num_seqs=_found(options.max_num_seqs, "scheduler.max_num_seqs"),
        max_num_batched_tokens=_found(options.max_num_batched_tokens, "scheduler.max_num_batched_tokens"),
        max_model_len=settings.model.max_len or 0,
        dtype=settings.model.dtype,
        device=device.kind,
        tensor_parallel_size=settings.parallel.tensor_parallel_size,
        block_size=cache.block_size or 0,
        num_blocks=cache.num_blocks or 0,
        kv_memory_bytes=int(cache.memory_gb * GIB),
        gpu_memory_utilization=cache.gpu_memory_utilization,
        attention_backend=settings.attention.backend,
        profile_steps=settings.server.profile_steps,
    )
    scheduler = SchedulerOptions(
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_num_partial_prefills=options.max_num_partial_prefills,
        max_long_partial_prefills=options.max_long_partial_prefills,
        enable_chunked_prefill=options.enable_chunked_prefill,
        enable_prefix_caching=cache.enable_prefix_caching,
        policy=options.policy,
        overlap_depth=options.overlap_depth,
    )
    return EngineSettings(
        worker=worker,
        scheduler=scheduler,
        model_name=settings.served_name,
        app_name=APP_NAME,
        rank_gpus=1.0 if device.kind == "cuda" else 0.0,
        placement=settings.parallel.placement,
        max_queue_seconds=settings.server.max_queue_seconds,
    )


def frontend_settings(settings: Settings, model_path: str) -> FrontendSettings:
    """The front ends' share of the tree. `model_path` is the local directory with the tokenizer."""
    server, scaling = settings.server, settings.autoscaling
    return FrontendSettings(
        model_path=model_path,
        model_name=settings.served_name,
        app_name=APP_NAME,
        api_key=server.api_key,
        # Front ends run in other directories than the launcher.
        api_key_file=_absolute(server.api_key_file),
        max_body_mb=server.max_body_mb,
        wake_seconds=scaling.wake_seconds if scaling.max_replicas and not scaling.min_replicas else None,
        uses_views=settings.parallel.router == "predicted",
        batch_directory=_absolute(settings.batch.directory),
        max_file_mb=settings.batch.max_file_mb,
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _found(value: int | None, name: str) -> int:
    if value is None:
        raise ConfigError(f"{name} is auto and no device was given to decide it")
    return value


def build(values: dict[str, Any]) -> Settings:
    """A tree from full names and parsed values; what is missing keeps its default. Raises ConfigError."""
    trees: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        prefix = section + "."
        trees[section] = kind(**{k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)})
    settings = Settings(**trees)
    check(settings)
    return settings
