"""Where a rank's step goes: timers around its parts, which do not know of them.

On a GPU each timer waits for the device, so stages are true and steps slower than they would be.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from workers import step_loop
from workers.attention import AttentionBackend
from workers.link import Link
from workers.model_runner import ModelRunner
from workers.models import DecoderModel
from workers.models.decoder import DecoderLayer
from workers.stage_clock import StageClock
from workers.tensor_parallel import TensorParallel


def profile_rank(
    model: DecoderModel, backend: AttentionBackend, tp: TensorParallel, runner: ModelRunner, device: torch.device
) -> StageClock:
    """Times everything between a plan and its result.

    Stages: "batch" (plan to tensors), "linears" (activation included), "attention" (rotation and writing of keys
    included), "norms", "other" (the rest of the forward pass), "head", "sample", "collectives", "report".
    """
    clock = StageClock(_synchronised(device) if device.type == "cuda" else time.perf_counter)
    model._layers = [_timed(layer, clock) for layer in model._layers]
    clock.wrap(model, "_norm", "norms")
    clock.wrap(model, "forward", "other")
    clock.wrap(model, "compute_logits", "head")
    for name in ("prepare", "rotate_and_write", "attend"):
        clock.wrap(backend, name, "attention")
    if tp.size > 1:
        for name in ("all_reduce", "gather"):
            clock.wrap(tp._group(), name, "collectives")
    clock.wrap(runner, "launch", "batch")
    clock.wrap(runner, "_sample", "sample")
    clock.wrap(runner, "collect", "report")
    return clock


def profile_link(link: Link, clock: StageClock) -> None:
    """Times what is between a result and the next plan: "wait" for the plan, "decode plan", "encode result", "send"."""
    clock.wrap(link, "receive", "wait")
    clock.wrap(link, "send", "send")
    clock.wrap(step_loop, "decode_plan", "decode plan")
    clock.wrap(step_loop, "encode", "encode result")


def _timed(layer: DecoderLayer, clock: StageClock) -> DecoderLayer:
    return replace(
        layer,
        attention_norm=clock.timed("norms", layer.attention_norm),
        qkv=clock.timed("linears", layer.qkv),
        attention_out=clock.timed("linears", layer.attention_out),
        ffn_norm=clock.timed("norms", layer.ffn_norm),
        gate_up=clock.timed("linears", layer.gate_up),
        down=clock.timed("linears", layer.down),
    )


def _synchronised(device: torch.device) -> Callable[[], float]:
    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
