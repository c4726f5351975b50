"""What an engine's steps become: times from given clocks, counts from given plans."""

import time

import pytest

from cluster.metrics.engine import EngineMetrics
from cluster.metrics.frontend import FrontendMetrics
from cluster.metrics.series import SERIES
from cluster.metrics.snapshot import MetricsSnapshot
from scheduler.plan import NewRequest, RequestOutput, SchedulerStats, StepPlan, StepResult
from scheduler.sampling_params import SamplingParams


def stats(running: int = 0, waiting: int = 0, used: int = 0, grammar: int = 0) -> SchedulerStats:
    return SchedulerStats(
        num_requests_running=running,
        num_requests_waiting=waiting,
        num_requests_waiting_for_grammar=grammar,
        num_blocks=100,
        num_used_blocks=used,
        token_budget=256,
        token_budget_reason="static",
        prompt_tokens=11,
        prompt_tokens_cached=4,
        generation_tokens=5,
        num_preemptions={"blocks": 2},
        recomputed_tokens=6,
        prefix_cache_queries=11,
        prefix_cache_hits=4,
        num_drafts=1,
        num_draft_tokens=3,
        num_accepted_tokens=2,
    )


def new_request(request_id: str, num_tokens: int, num_computed_tokens: int = 0) -> NewRequest:
    return NewRequest(request_id, [1] * num_tokens, num_tokens, SamplingParams(8), [0], num_computed_tokens)


class Steps:
    """Feeds steps to an EngineMetrics by a clock of its own that runs from the present on."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.start = time.perf_counter()
        self.step_id = 0

    def step(
        self,
        scheduled: dict[str, int],
        outputs: list[RequestOutput],
        sent: float,
        received: float,
        new: tuple[NewRequest, ...] = (),
        execute: float = 0.0,
        after: SchedulerStats | None = None,
    ) -> None:
        plan = StepPlan(0, self.step_id, scheduled, list(new))
        result = StepResult(0, self.step_id, execute_seconds=execute)
        self.step_id += 1
        after = after if after is not None else stats(running=1)
        self.metrics.observe(plan, result, outputs, after, self.start + sent, self.start + received)


def totals(snapshot: MetricsSnapshot, *key: str) -> tuple[int, float]:
    """Count and sum of a histogram."""
    histogram = snapshot.histograms[key]
    return sum(histogram.counts), histogram.sum


def test_times_of_one_request() -> None:
    steps = Steps()
    steps.metrics.add("a", 20, time.time())
    steps.step({"a": 16}, [], sent=100.0, received=101.0, new=(new_request("a", 20),))
    steps.step({"a": 4}, [RequestOutput("a", [5])], sent=101.0, received=103.0)
    steps.step({"a": 1}, [RequestOutput("a", [6])], sent=103.0, received=103.5)
    steps.step({"a": 1}, [RequestOutput("a", [7], "length")], sent=103.5, received=104.5)
    snapshot = steps.metrics.snapshot()
    # `add` reads the real clock, a moment after `start`.
    near = {"abs": 1.0}
    assert totals(snapshot, "request_queue_time_seconds") == (1, pytest.approx(100.0, **near))
    assert totals(snapshot, "time_to_first_token_seconds") == (1, pytest.approx(103.0, **near))
    assert totals(snapshot, "e2e_request_latency_seconds") == (1, pytest.approx(104.5, **near))
    assert totals(snapshot, "request_prefill_time_seconds") == (1, pytest.approx(3.0))
    assert totals(snapshot, "request_decode_time_seconds") == (1, pytest.approx(1.5))
    assert totals(snapshot, "inter_token_latency_seconds") == (2, pytest.approx(1.5))
    assert totals(snapshot, "request_time_per_output_token_seconds") == (1, pytest.approx(0.75))
    assert totals(snapshot, "request_prompt_tokens") == (1, 20)
    assert totals(snapshot, "request_generation_tokens") == (1, 3)
    assert snapshot.counters[("request_success", "length")] == 1
    assert snapshot.counters[("request_success", "stop")] == 0


def test_time_in_the_queue_counts_from_the_front_ends_clock() -> None:
    steps = Steps()
    steps.metrics.add("a", 4, time.time() - 50.0)
    steps.metrics.add("b", 4, time.time() + 50.0)  # a clock that is ahead of ours
    steps.step({"a": 4, "b": 4}, [], 0.0, 1.0, new=(new_request("a", 4), new_request("b", 4)))
    assert totals(steps.metrics.snapshot(), "request_queue_time_seconds") == (2, pytest.approx(50.0, abs=1.0))


def test_a_stream_that_another_engine_has_lost_counts_once() -> None:
    """Two tokens came from the first engine; the second one is 20 s behind the last of them."""
    first, second = Steps(), Steps()
    now = time.time()
    first.metrics.add("a", 20, now - 30.0)
    first.step({"a": 20}, [RequestOutput("a", [5])], 0.0, 0.0, new=(new_request("a", 20),))
    first.step({"a": 1}, [RequestOutput("a", [6])], 0.0, 5.0)
    first.metrics.finish("a", "lost")
    second.metrics.add("b", 20, now - 30.0, 2, (now - 25.0, now - 20.0), resubmitted=True)
    second.step({"b": 22}, [RequestOutput("b", [7])], 0.0, 0.0, new=(new_request("b", 22),))
    second.step({"b": 1}, [RequestOutput("b", [8], "length")], 0.0, 5.0)
    snapshots = first.metrics.snapshot(), second.metrics.snapshot()

    def both(*key: str) -> tuple[int, float]:
        (count, total), (more, added) = (totals(snapshot, *key) for snapshot in snapshots)
        return count + more, total + added

    near = {"abs": 1.0}
    assert both("time_to_first_token_seconds") == (1, pytest.approx(30.0, **near))
    assert both("request_queue_time_seconds") == (1, pytest.approx(30.0, **near))
    assert both("request_prefill_time_seconds")[0] == 1
    assert both("inter_token_latency_seconds") == (3, pytest.approx(5.0 + 20.0 + 5.0, **near))
    assert both("e2e_request_latency_seconds") == (1, pytest.approx(35.0, **near))
    assert both("request_decode_time_seconds") == (1, pytest.approx(30.0, **near))
    assert both("request_time_per_output_token_seconds") == (1, pytest.approx(10.0, **near))
    assert both("request_prompt_tokens") == (1, 20)
    assert both("request_generation_tokens") == (1, 4)
    ended = [value for snapshot in snapshots for key, value in snapshot.counters.items() if key[0] == "request_success"]
    assert sum(ended) == 1
    assert [snapshot.counters[("request_resubmissions",)] for snapshot in snapshots] == [0, 1]


def test_a_request_lost_before_its_first_token_has_it_elsewhere() -> None:
    steps = Steps()
    steps.metrics.add("a", 4, time.time() - 30.0, resubmitted=True)
    steps.step({"a": 4}, [RequestOutput("a", [1])], 0.0, 1.0, new=(new_request("a", 4),))
    snapshot = steps.metrics.snapshot()
    assert totals(snapshot, "time_to_first_token_seconds") == (1, pytest.approx(31.0, abs=1.0))
    assert totals(snapshot, "request_queue_time_seconds")[0] == 0
    assert totals(snapshot, "request_prefill_time_seconds")[0] == 0


def test_steps_are_told_apart_by_what_they_compute() -> None:
    steps = Steps()
    for request_id in "ab":
        steps.metrics.add(request_id, 10, time.time())
    steps.step({"a": 8}, [], 0, 1, new=(new_request("a", 10),), execute=1.0)
    steps.step({"a": 1}, [], 1, 2, execute=2.0)  # a chunk of one token is a chunk
    steps.step({"a": 1}, [], 2, 3, execute=4.0)  # the last known token: computing it is decoding
    steps.step({"a": 1, "b": 6}, [], 3, 4, new=(new_request("b", 10, num_computed_tokens=4),), execute=8.0)
    steps.step({"a": 1, "b": 1}, [], 4, 5, execute=16.0)
    snapshot = steps.metrics.snapshot()
    assert totals(snapshot, "step_time_seconds", "prefill") == (2, 3.0)
    assert totals(snapshot, "step_time_seconds", "decode") == (2, 20.0)
    assert totals(snapshot, "step_time_seconds", "mixed") == (1, 8.0)
    assert totals(snapshot, "step_prefill_tokens") == (5, 15)
    assert totals(snapshot, "step_decode_tokens") == (5, 4)
    assert totals(snapshot, "iteration_tokens_total") == (5, 19)


def test_a_resumed_request_is_a_chunk_again_and_queues_only_once() -> None:
    steps = Steps()
    steps.metrics.add("a", 4, time.time())
    steps.step({"a": 4}, [RequestOutput("a", [1])], 0, 1, new=(new_request("a", 4),))
    steps.step({"a": 5}, [RequestOutput("a", [2])], 9, 10, new=(new_request("a", 5),))
    snapshot = steps.metrics.snapshot()
    assert totals(snapshot, "step_prefill_tokens") == (2, 9)
    assert totals(snapshot, "request_queue_time_seconds")[0] == 1
    assert totals(snapshot, "time_to_first_token_seconds")[0] == 1
    assert totals(snapshot, "inter_token_latency_seconds") == (1, pytest.approx(9.0))


def test_collectives_are_measured_where_there_are_any() -> None:
    metrics = EngineMetrics()
    for step_id, seconds in enumerate((0.0, 0.002, 0.003)):
        plan, result = StepPlan(0, step_id, {}), StepResult(0, step_id, collective_seconds=seconds)
        metrics.observe(plan, result, [], stats(), 0.0, 1.0)
    assert totals(metrics.snapshot(), "collective_seconds") == (2, pytest.approx(0.005))


def test_device_idle_is_what_a_step_waited_for_its_plan() -> None:
    steps = Steps()
    busy, done = stats(running=1), stats()
    steps.step({"a": 1}, [], sent=0.0, received=1.0, execute=1.0, after=busy)
    # Depth 2: sent before the last result, so the worker went on at once.
    steps.step({"a": 1}, [], sent=0.5, received=2.25, execute=1.0, after=busy)
    assert totals(steps.metrics.snapshot(), "device_idle_seconds") == (2, pytest.approx(0.25))
    # Depth 1: sent half a second after the last result.
    steps.step({"a": 1}, [], sent=2.75, received=3.75, execute=1.0, after=done)
    assert totals(steps.metrics.snapshot(), "device_idle_seconds") == (3, pytest.approx(0.75))
    # No work for a hundred seconds is no idleness, even if the gauges are refreshed by a new request.
    steps.metrics.update_stats(stats(waiting=1))
    steps.step({"b": 1}, [], sent=103.0, received=104.0, execute=1.0, after=busy)
    assert totals(steps.metrics.snapshot(), "device_idle_seconds") == (4, pytest.approx(0.75))
    # Nor is a pause after an abort that no step told of.
    steps.metrics.update_stats(done)
    steps.step({"c": 1}, [], sent=200.0, received=201.0, execute=1.0, after=busy)
    assert totals(steps.metrics.snapshot(), "device_idle_seconds") == (5, pytest.approx(0.75))


def test_an_abort_is_counted_once_and_leaves_no_latency() -> None:
    steps = Steps()
    for request_id in "abc":
        steps.metrics.add(request_id, 4, time.time())
    steps.metrics.finish("a", "abort")
    steps.metrics.finish("a", "abort")
    steps.step({"a": 4, "b": 4}, [RequestOutput("a", [1], "abort"), RequestOutput("b", [1], "abort")], 0, 1)
    steps.metrics.finish("c", "stop")
    steps.metrics.finish("never added", "abort")
    snapshot = steps.metrics.snapshot()
    assert snapshot.counters[("request_aborts",)] == 2
    assert snapshot.counters[("request_success", "abort")] == 2
    assert snapshot.counters[("request_success", "stop")] == 1
    assert totals(snapshot, "e2e_request_latency_seconds")[0] == 1
    assert not steps.metrics._requests


def test_gauges_and_counters_are_the_schedulers_own() -> None:
    metrics = EngineMetrics()
    assert metrics.snapshot().gauges == {("engine_up",): 0.0}
    metrics.set_cache_config(16, 100, True)
    metrics.set_up(True)
    metrics.refuse("prompt")
    metrics.update_stats(stats(running=3, waiting=5, used=25, grammar=2))
    snapshot = metrics.snapshot()
    assert snapshot.gauges == {
        ("engine_up",): 1.0,
        ("cache_config_info", "16", "100", "True"): 1.0,
        ("num_requests_running",): 3,
        ("num_requests_waiting",): 5,
        ("num_requests_waiting_by_reason", "capacity"): 3,
        ("num_requests_waiting_by_reason", "grammar"): 2,
        ("kv_cache_usage_perc",): 0.25,
        ("token_budget",): 256,
        ("token_budget_reason", "static"): 1.0,
    }
    expected = {
        ("prompt_tokens",): 11,
        ("prompt_tokens_cached",): 4,
        ("generation_tokens",): 5,
        ("num_preemptions", "blocks"): 2,
        ("num_preemptions", "priority"): 0,
        ("recomputed_tokens",): 6,
        ("prefix_cache_queries",): 11,
        ("prefix_cache_hits",): 4,
        ("spec_decode_num_drafts",): 1,
        ("spec_decode_num_draft_tokens",): 3,
        ("spec_decode_num_accepted_tokens",): 2,
        ("admission_rejections", "prompt"): 1,
    }
    assert {key: snapshot.counters[key] for key in expected} == expected
    metrics.set_up(False)
    down = metrics.snapshot()
    assert down.counters == snapshot.counters
    assert down.gauges == {("engine_up",): 0.0, ("cache_config_info", "16", "100", "True"): 1.0}


def test_a_snapshot_does_not_change_afterwards() -> None:
    steps = Steps()
    before = steps.metrics.snapshot()
    steps.step({"a": 1}, [], 0, 1)
    assert totals(before, "iteration_tokens_total") == (0, 0)
    assert totals(steps.metrics.snapshot(), "iteration_tokens_total") == (1, 1)


def test_every_key_names_a_series_with_as_many_labels() -> None:
    metrics = EngineMetrics()
    metrics.set_cache_config(16, 100, True)
    metrics.update_stats(stats())
    metrics.refuse("prompt")
    frontend = FrontendMetrics()
    frontend.refuse("queue")
    frontend.observe_overhead(0.002)
    for snapshot in (metrics.snapshot(), frontend.snapshot()):
        for kind, values in (
            ("counter", snapshot.counters), ("gauge", snapshot.gauges), ("histogram", snapshot.histograms)
        ):  # fmt: skip
            for name, *labels in values:
                assert SERIES[name].kind == kind
                assert len(labels) == len(SERIES[name].labels)


def test_a_front_end_counts_refusals_and_overhead() -> None:
    frontend = FrontendMetrics()
    frontend.refuse("queue")
    frontend.refuse("queue")
    frontend.observe_overhead(0.002)
    snapshot = frontend.snapshot()
    assert snapshot.counters == {("admission_rejections", "queue"): 2}
    assert totals(snapshot, "http_overhead_seconds") == (1, 0.002)


def test_routes_by_reason_and_the_age_of_what_was_known() -> None:
    frontend = FrontendMetrics()
    for reason, age in (("hit", 0.03), ("hit", 0.2), ("least_work", 0.0), ("stale", 0.0)):
        frontend.observe_route(reason, age)
    snapshot = frontend.snapshot()
    routed = {key[1]: count for key, count in snapshot.counters.items() if key[0] == "routed_requests"}
    assert routed == {"hit": 2, "least_work": 1, "stale": 1}
    ages = snapshot.histograms[("routing_view_age_seconds",)]
    assert (sum(ages.counts), round(ages.sum, 3)) == (3, 0.23)
