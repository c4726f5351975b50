"""The catalogue of series: what the service measures, under which name. Plain data; no Prometheus here.

Names and meanings follow vLLM's, so that dashboards and autoscalers move over by changing the prefix.
Every series carries the labels `model_name` and `engine` before its own; series of front ends are
summed over front ends and have an empty `engine`.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "chunkserve:"

SeriesKind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Series:
    """One series: its kind, its own label names, and for a histogram the upper bounds of its buckets."""

    kind: SeriesKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Ascending, without +Inf."""


# Seconds of a whole request or of one of its parts.
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                       20.0, 40.0, 80.0, 160.0)  # fmt: skip
# Seconds of one step, or between two tokens: from 1 ms, fine where a person notices.
STEP_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2,
                0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)  # fmt: skip
# Seconds of the control plane: from 10 us.
OVERHEAD_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                    1.0, 2.5)  # fmt: skip
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

SERIES: dict[str, Series] = {
    # Gauges of engines
    "engine_up": Series("gauge", "1 while the engine serves, 0 while it starts or is lost."),
    "startup_phase_seconds": Series("gauge", "Seconds each finished phase of start-up took.", ("phase",)),
    "num_requests_running": Series("gauge", "Requests in the running batch."),
    "num_requests_waiting": Series("gauge", "Requests that wait to be scheduled, preempted ones included."),
    "num_requests_waiting_by_reason": Series("gauge", "Waiting requests by what they wait for.", ("reason",)),
    "kv_cache_usage_perc": Series("gauge", "Referenced KV blocks as a share of all; 1 is full."),
    "cache_config_info": Series(
        "gauge", "Sizes of the KV cache, as labels.", ("block_size", "num_gpu_blocks", "enable_prefix_caching")
    ),
    "token_budget": Series("gauge", "Token budget of the last step."),
    "token_budget_reason": Series("gauge", "1 for what decided the last step's token budget.", ("reason",)),
    # Counters of engines
    "prompt_tokens": Series("counter", "Prompt tokens of admitted requests."),
    "prompt_tokens_cached": Series("counter", "Of these, tokens that the prefix cache gave."),
    "generation_tokens": Series("counter", "Tokens generated."),
    "request_success": Series("counter", "Finished requests by finish reason.", ("finished_reason",)),
    "request_aborts": Series("counter", "Requests ended because their client left or asked."),
    "request_resubmissions": Series("counter", "Requests that go on after another engine has lost them."),
    "engine_recoveries": Series("counter", "Restarts of an engine's ranks by what they were lost to.", ("cause",)),
    "admission_rejections": Series("counter", "Requests refused before they were scheduled.", ("reason",)),
    "num_preemptions": Series("counter", "Preemptions by reason.", ("reason",)),
    "recomputed_tokens": Series("counter", "Tokens computed again after a preemption."),
    "prefix_cache_queries": Series("counter", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": Series("counter", "Tokens found in the prefix cache."),
    "spec_decode_num_drafts": Series("counter", "Verified lists of draft tokens."),
    "spec_decode_num_draft_tokens": Series("counter", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": Series("counter", "Draft tokens accepted."),
    # Histograms of engines
    "time_to_first_token_seconds": Series(
        "histogram", "From arrival at the front end to the first token.", (), FIRST_TOKEN_SECONDS
    ),
    "inter_token_latency_seconds": Series(
        "histogram", "Between two outputs of a request, one value a request and step.", (), STEP_SECONDS
    ),
    "request_time_per_output_token_seconds": Series(
        "histogram", "A request's mean time per token after its first.", (), STEP_SECONDS
    ),
    "e2e_request_latency_seconds": Series("histogram", "From arrival to the end.", (), REQUEST_SECONDS),
    "request_queue_time_seconds": Series("histogram", "From arrival to the first plan.", (), REQUEST_SECONDS),
    "request_prefill_time_seconds": Series("histogram", "From the first plan to the first token.", (), REQUEST_SECONDS),
    "request_decode_time_seconds": Series("histogram", "From the first token to the last.", (), REQUEST_SECONDS),
    "request_prompt_tokens": Series("histogram", "Prompt tokens of finished requests.", (), TOKENS),
    "request_generation_tokens": Series("histogram", "Generated tokens of finished requests.", (), TOKENS),
    "iteration_tokens_total": Series("histogram", "Tokens computed in a step.", (), STEP_TOKENS),
    "step_time_seconds": Series("histogram", "Step time, measured at the worker.", ("kind",), STEP_SECONDS),
    "step_time_prediction_error_ratio": Series(
        "histogram", "How far the predicted time of a step was off, as a share of its time.", (), RATIOS
    ),
    "step_prefill_tokens": Series("histogram", "Tokens of a step that belong to chunks.", (), STEP_TOKENS),
    "step_decode_tokens": Series("histogram", "Tokens of a step that belong to decodes.", (), STEP_TOKENS),
    "device_idle_seconds": Series(
        "histogram", "Time before a step in which the worker had no plan though there was work.", (), OVERHEAD_SECONDS
    ),
    "collective_seconds": Series(
        "histogram",
        "Time of a step in collectives among ranks on CPUs, waiting for slower ranks included, measured at rank 0.",
        (),
        OVERHEAD_SECONDS,
    ),
    # Front ends
    "http_overhead_seconds": Series(
        "histogram", "From a request's arrival to its hand-over to an engine.", (), OVERHEAD_SECONDS
    ),
    "routed_requests": Series("counter", "Choices of an engine for a request, by why it was chosen.", ("reason",)),
    "routing_view_age_seconds": Series(
        "histogram", "Since the chosen engine had last told of its cache and queue.", (), STEP_SECONDS
    ),
}
