"""What an engine measures: fed by the step loop, read by the pusher once a second."""

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.metrics.series import SERIES
from cluster.metrics.snapshot import HistogramAccumulator, MetricsSnapshot, SeriesKey
from scheduler.plan import RequestOutput, SchedulerStats, StepPlan, StepResult

FINISH_REASONS = ("stop", "length", "abort", "error")
PREEMPTION_REASONS = ("blocks", "priority", "epoch", "hold")
STEP_KINDS = ("decode", "mixed", "prefill")


@dataclass(slots=True)
class _RequestTimes:
    """Times of one request by `time.perf_counter()`, in seconds."""

    arrival: float
    num_prompt_tokens: int
    resubmitted: bool
    """Another engine has observed its first plan."""
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    num_output_tokens: int = 0
    owed: int = 0
    """Known tokens not computed yet; at most 1 when the request is decoding."""


class EngineMetrics:
    """Turns an engine's steps and requests into series.

    Any thread may call it; nothing waits longer than a copy of its totals takes. No Prometheus object
    is touched: values are added to plain lists and dicts, and `snapshot` copies them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cache_config: SeriesKey | None = None
        self._up = False
        self._requests: dict[str, _RequestTimes] = {}
        self._stats: SchedulerStats | None = None
        self._finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._aborts = 0
        self._resubmissions = 0
        self._rejections: Counter[str] = Counter()
        self._recoveries: Counter[str] = Counter()
        self._histograms: dict[SeriesKey, HistogramAccumulator] = {}
        self._ttft = self._histogram("time_to_first_token_seconds")
        self._itl = self._histogram("inter_token_latency_seconds")
        self._tpot = self._histogram("request_time_per_output_token_seconds")
        self._e2e = self._histogram("e2e_request_latency_seconds")
        self._queue_time = self._histogram("request_queue_time_seconds")
        self._prefill_time = self._histogram("request_prefill_time_seconds")
        self._decode_time = self._histogram("request_decode_time_seconds")
        self._prompt_tokens = self._histogram("request_prompt_tokens")
        self._generation_tokens = self._histogram("request_generation_tokens")
        self._iteration_tokens = self._histogram("iteration_tokens_total")
        self._step_prefill_tokens = self._histogram("step_prefill_tokens")
        self._step_decode_tokens = self._histogram("step_decode_tokens")
        self._device_idle = self._histogram("device_idle_seconds")
        self._collectives = self._histogram("collective_seconds")
        self._prediction_error = self._histogram("step_time_prediction_error_ratio")
        self._step_time = {kind: self._histogram("step_time_seconds", kind) for kind in STEP_KINDS}
        self._last_received_at: float | None = None
        self._had_work = False

    def _histogram(self, name: str, *labels: str) -> HistogramAccumulator:
        accumulator = HistogramAccumulator(SERIES[name].buckets)
        self._histograms[(name, *labels)] = accumulator
        return accumulator

    # The engine's life

    def set_cache_config(self, block_size: int, num_blocks: int, enable_prefix_caching: bool) -> None:
        """What start-up measured: tokens a block holds, and blocks."""
        with self._lock:
            self._cache_config = ("cache_config_info", str(block_size), str(num_blocks), str(enable_prefix_caching))

    def set_up(self, up: bool) -> None:
        """Whether the engine can serve now (`engine_up`); False when built."""
        with self._lock:
            self._up = up

    def recover(self, cause: str) -> None:
        """Ranks were lost, and are started anew. `cause` is one of a few fixed words, never a message."""
        with self._lock:
            self._recoveries[cause] += 1

    def update_stats(self, stats: SchedulerStats) -> None:
        """Adds or aborts changed the gauges, and no step follows: call it before the loop goes to sleep."""
        with self._lock:
            self._stats = stats
            self._had_work = self._had_work and _has_work(stats)

    # Requests

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int,
        arrival_time: float,
        num_output_tokens: int = 0,
        delivered_at: tuple[float, float] | None = None,
        *,
        resubmitted: bool = False,
    ) -> None:
        """A request was accepted. Times are seconds since 1970 by the front end's clock.

        One that is `resubmitted` goes on here after another engine has lost it, behind `num_output_tokens` of which
        the first and the last were delivered at `delivered_at`. What the other engine has observed of it is not
        observed again, and the pause is one long gap.
        """
        ago = time.perf_counter() - time.time()

        def local(at: float) -> float:
            # Clocks of two machines may disagree: nobody arrives in the future.
            return min(at + ago, time.perf_counter())

        times = _RequestTimes(local(arrival_time), num_prompt_tokens, resubmitted, num_output_tokens=num_output_tokens)
        if delivered_at is not None:
            times.first_token, times.last_token = map(local, delivered_at)
        with self._lock:
            self._requests[request_id] = times
            self._resubmissions += resubmitted

    def refuse(self, reason: str) -> None:
        """A request was refused when it was added. `reason` is one of a few fixed words, never a message."""
        with self._lock:
            self._rejections[reason] += 1

    def finish(self, request_id: str, reason: str) -> None:
        """A request was ended between steps: "stop" (stop string), "abort" (client left), "error" or "lost".

        Does nothing for a request that has ended already, so an output that says the same may follow.
        """
        now = time.perf_counter()
        with self._lock:
            times = self._requests.pop(request_id, None)
            if times is not None:
                self._observe_finish(times, reason, now)

    # Steps

    def observe(
        self,
        plan: StepPlan,
        result: StepResult,
        outputs: Iterable[RequestOutput],
        stats: SchedulerStats,
        sent_at: float,
        received_at: float,
    ) -> None:
        """One step has ended. Call it after `update_from_result`, in the order of the plans.

        `outputs` and `stats` are what the scheduler gave for this result. `sent_at`, `received_at`:
        `time.perf_counter()` when the plan was sent and when its result arrived, in seconds.
        """
        with self._lock:
            self._observe_plan(plan, result.execute_seconds, sent_at)
            self._observe_idle(result.execute_seconds, sent_at, received_at)
            if result.collective_seconds > 0:
                self._collectives.observe(result.collective_seconds)
            for output in outputs:
                self._observe_output(output, received_at)
            self._stats = stats
            self._had_work = _has_work(stats)

    def observe_prediction(self, error_ratio: float) -> None:
        """By how much the time of a step was predicted wrong, as a share of it."""
        with self._lock:
            self._prediction_error.observe(error_ratio)

    def _observe_plan(self, plan: StepPlan, execute_seconds: float, sent_at: float) -> None:
        requests = self._requests
        for new in plan.new_requests:
            times = requests.get(new.request_id)
            if times is not None:
                times.owed = len(new.token_ids) - new.num_computed_tokens
                if times.scheduled is None:
                    times.scheduled = max(sent_at, times.arrival)
                    if not times.resubmitted:
                        self._queue_time.observe(times.scheduled - times.arrival)
        prefill = decode = 0
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            times = requests.get(request_id)
            if times is not None and times.owed > 1:
                times.owed -= num_tokens
                prefill += num_tokens
            else:
                decode += num_tokens
        self._iteration_tokens.observe(prefill + decode)
        self._step_prefill_tokens.observe(prefill)
        self._step_decode_tokens.observe(decode)
        kind = "decode" if not prefill else "mixed" if decode else "prefill"
        self._step_time[kind].observe(execute_seconds)

    def _observe_idle(self, execute_seconds: float, sent_at: float, received_at: float) -> None:
        """Wall time the step did not need: since the last result, or since the plan after a true pause."""
        last = self._last_received_at
        start = last if last is not None and (self._had_work or sent_at < last) else sent_at
        self._device_idle.observe(max(0.0, received_at - start - execute_seconds))
        self._last_received_at = received_at

    def _observe_output(self, output: RequestOutput, now: float) -> None:
        times = self._requests.get(output.request_id)
        if times is None:
            return  # Ended between steps already.
        if output.new_token_ids:
            self._observe_tokens(times, len(output.new_token_ids), now)
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            self._observe_finish(times, output.finish_reason, now)

    def _observe_tokens(self, times: _RequestTimes, num_tokens: int, now: float) -> None:
        if times.first_token is None:
            times.first_token = now
            self._ttft.observe(now - times.arrival)
            if times.scheduled is not None and not times.resubmitted:
                self._prefill_time.observe(now - times.scheduled)
        else:
            self._itl.observe(now - times.last_token)
        times.last_token = now
        times.num_output_tokens += num_tokens

    def _observe_finish(self, times: _RequestTimes, reason: str, now: float) -> None:
        if reason == "lost":
            return  # It has not ended: it goes on elsewhere, and is counted there.
        self._finished[reason] += 1
        if reason == "abort":
            self._aborts += 1
        if reason not in ("stop", "length"):
            return  # A request cut short says nothing about latency.
        self._e2e.observe(now - times.arrival)
        self._prompt_tokens.observe(times.num_prompt_tokens)
        self._generation_tokens.observe(times.num_output_tokens)
        if times.first_token is not None:
            decode_seconds = times.last_token - times.first_token
            self._decode_time.observe(decode_seconds)
            if times.num_output_tokens > 1:
                self._tpot.observe(decode_seconds / (times.num_output_tokens - 1))

    # Reading

    def snapshot(self) -> MetricsSnapshot:
        """Totals since this object was built, and gauges as of the last step; of an engine that is not up, none
        of the scheduler's, for what it holds is lost.
        """
        with self._lock:
            counters: dict[SeriesKey, float] = {
                ("request_aborts",): self._aborts,
                ("request_resubmissions",): self._resubmissions,
            }
            counters |= {("request_success", reason): count for reason, count in self._finished.items()}
            counters |= {("admission_rejections", reason): count for reason, count in self._rejections.items()}
            counters |= {("engine_recoveries", cause): count for cause, count in self._recoveries.items()}
            histograms = {key: accumulator.totals() for key, accumulator in self._histograms.items()}
            stats, up, cache_config = self._stats, self._up, self._cache_config
        gauges: dict[SeriesKey, float] = {("engine_up",): float(up)}
        if cache_config is not None:
            gauges[cache_config] = 1.0
        if stats is not None:
            counters |= _stats_counters(stats)
            if up:
                gauges |= _stats_gauges(stats)
        return MetricsSnapshot(counters, gauges, histograms)


def _has_work(stats: SchedulerStats) -> bool:
    return stats.num_requests_running + stats.num_requests_waiting > 0


def _stats_gauges(stats: SchedulerStats) -> dict[SeriesKey, float]:
    grammar = stats.num_requests_waiting_for_grammar
    return {
        ("num_requests_running",): stats.num_requests_running,
        ("num_requests_waiting",): stats.num_requests_waiting,
        ("num_requests_waiting_by_reason", "capacity"): stats.num_requests_waiting - grammar,
        ("num_requests_waiting_by_reason", "grammar"): grammar,
        ("kv_cache_usage_perc",): stats.num_used_blocks / stats.num_blocks,
        ("token_budget",): stats.token_budget,
        ("token_budget_reason", stats.token_budget_reason): 1.0,
    }


def _stats_counters(stats: SchedulerStats) -> dict[SeriesKey, float]:
    preemptions = dict.fromkeys(PREEMPTION_REASONS, 0) | stats.num_preemptions
    counters: dict[SeriesKey, float] = {
        ("prompt_tokens",): stats.prompt_tokens,
        ("prompt_tokens_cached",): stats.prompt_tokens_cached,
        ("generation_tokens",): stats.generation_tokens,
        ("recomputed_tokens",): stats.recomputed_tokens,
        ("prefix_cache_queries",): stats.prefix_cache_queries,
        ("prefix_cache_hits",): stats.prefix_cache_hits,
        ("spec_decode_num_drafts",): stats.num_drafts,
        ("spec_decode_num_draft_tokens",): stats.num_draft_tokens,
        ("spec_decode_num_accepted_tokens",): stats.num_accepted_tokens,
    }
    return counters | {("num_preemptions", reason): count for reason, count in preemptions.items()}
