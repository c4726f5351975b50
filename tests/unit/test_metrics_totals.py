"""The service's totals: sums of the truth whatever is lost, repeated, late, restarted or dead."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from cluster.metrics.snapshot import HistogramTotals, MetricsSnapshot, MetricsSource
from cluster.metrics.totals import ServiceTotals

COUNTER = ("generation_tokens",)
HISTOGRAM = ("step_decode_tokens",)


def engine(source_id: str, epoch: int = 1) -> MetricsSource:
    return MetricsSource(source_id, epoch, "engine", "tiny")


def counted(total: float) -> MetricsSnapshot:
    return MetricsSnapshot(counters={COUNTER: total})


def running(number: float) -> MetricsSnapshot:
    return MetricsSnapshot(gauges={("num_requests_running",): number, ("engine_up",): 1.0})


def shown(totals: ServiceTotals, now: float, name: str) -> dict[str, float]:
    """Engine label -> value of the series `name`."""
    return {s.engine: s.value for s in totals.samples(now) if s.key[0] == name and isinstance(s.value, float)}


def counter_sum(totals: ServiceTotals, now: float) -> float:
    return sum(shown(totals, now, COUNTER[0]).values())


def histogram_sum(totals: ServiceTotals, now: float) -> tuple[list[int], float]:
    found = [s.value for s in totals.samples(now) if s.key == HISTOGRAM and isinstance(s.value, HistogramTotals)]
    counts = [sum(column) for column in zip(*(h.counts for h in found), strict=True)] if found else [0, 0]
    return counts, sum(h.sum for h in found)


# (source, what happens, seconds until the next event)
events = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["count", "count", "push", "push", "repeat an old push", "restart", "leave"]),
        st.sampled_from([0.0, 1.0, 7.0]),
    ),
    max_size=60,
)


@given(events)
def test_totals_are_the_sum_of_all_pushes_and_never_fall(events: list[tuple[str, str, float]]) -> None:
    totals = ServiceTotals()
    epoch: dict[str, int] = defaultdict(lambda: 1)
    small: dict[str, int] = defaultdict(int)  # this epoch's observations of 1
    large: dict[str, int] = defaultdict(int)  # and of 100, in the second bucket
    pushes: list[tuple[MetricsSource, int, int]] = []
    truth: dict[tuple[str, int], tuple[int, int]] = {}
    now, last_counter, last_counts = 0.0, 0.0, [0, 0]
    for step, (name, event, pause) in enumerate(events):
        if event == "count":
            small[name] += 1
            large[name] += step % 3
        elif event == "push":
            pushes.append((engine(name, epoch[name]), small[name], large[name]))
            truth[(name, epoch[name])] = (small[name], large[name])
        elif event == "restart":
            epoch[name] += 1
            small[name] = large[name] = 0
        elif event == "leave":
            totals.leave(name, now)
        if pushes and event in ("push", "repeat an old push"):
            source, ones, hundreds = pushes[-1] if event == "push" else pushes[step % len(pushes)]
            value = HistogramTotals([ones, hundreds], ones + 100.0 * hundreds)
            totals.push(source, MetricsSnapshot({COUNTER: ones}, {}, {HISTOGRAM: value}), now)
        now += pause
        expected = [sum(t[0] for t in truth.values()), sum(t[1] for t in truth.values())]
        counts, total = histogram_sum(totals, now)
        assert counter_sum(totals, now) == expected[0]
        assert counts == expected
        assert total == expected[0] + 100.0 * expected[1]
        assert counter_sum(totals, now) >= last_counter
        assert all(new >= old for new, old in zip(counts, last_counts, strict=True))
        last_counter, last_counts = counter_sum(totals, now), counts


def test_gauges_of_a_silent_engine_expire_and_it_is_shown_as_down() -> None:
    totals = ServiceTotals(live_seconds=5.0)
    totals.push(engine("a"), running(3.0), now=0.0)
    assert shown(totals, 4.0, "num_requests_running") == {"0": 3.0}
    assert shown(totals, 4.0, "engine_up") == {"0": 1.0}
    assert shown(totals, 5.5, "num_requests_running") == {}
    assert shown(totals, 5.5, "engine_up") == {"0": 0.0}
    assert totals.status(5.5) == []


def test_an_engine_that_leaves_takes_its_gauges_along_but_not_its_counters() -> None:
    totals = ServiceTotals()
    totals.push(engine("a"), running(3.0), now=0.0)
    totals.push(engine("a"), counted(7), now=0.0)
    totals.leave("a", now=1.0)
    assert shown(totals, 1.0, "engine_up") == {}
    assert counter_sum(totals, 1.0) == 7


def test_a_replacement_counts_on_under_the_number_of_the_engine_it_replaces() -> None:
    totals = ServiceTotals(live_seconds=5.0)
    totals.push(engine("a"), counted(7), now=0.0)
    totals.push(engine("b"), counted(5), now=4.0)
    totals.push(engine("c"), counted(2), now=8.0)  # "a" is dead by now
    assert shown(totals, 8.0, COUNTER[0]) == {"0": 9, "1": 5}
    assert shown(totals, 8.0, "engine_up") == {"0": 0.0, "1": 0.0}  # living, but not serving yet
    totals.push(engine("a"), counted(8), now=8.5)  # It was only slow: one token more, and a new number.
    assert shown(totals, 8.5, COUNTER[0]) == {"0": 9, "1": 5, "2": 1}


def test_a_slow_engine_that_was_not_replaced_keeps_its_number() -> None:
    totals = ServiceTotals(live_seconds=5.0)
    totals.push(engine("a"), counted(7), now=0.0)
    totals.push(engine("b"), counted(5), now=0.0)
    totals.push(engine("b"), counted(6), now=8.0)
    totals.push(engine("a"), counted(9), now=8.0)
    assert shown(totals, 8.0, COUNTER[0]) == {"0": 9, "1": 6}


def test_a_late_push_of_an_old_epoch_does_not_bring_its_gauges_back() -> None:
    totals = ServiceTotals()
    totals.push(engine("a", epoch=2), running(0.0), now=0.0)
    totals.push(engine("a", epoch=1), running(9.0), now=0.1)
    assert shown(totals, 0.1, "num_requests_running") == {"0": 0.0}


def test_front_ends_are_summed_under_an_empty_engine_label() -> None:
    totals = ServiceTotals()
    for source_id, count in (("f1", 3), ("f2", 4)):
        source = MetricsSource(source_id, 1, "frontend", "tiny")
        totals.push(source, MetricsSnapshot(counters={("admission_rejections", "queue"): count}), now=0.0)
    assert shown(totals, 0.0, "admission_rejections") == {"": 7}


def test_start_up_phases_are_told_while_they_run_and_after() -> None:
    totals = ServiceTotals()
    totals.push(engine("a"), MetricsSnapshot(phase="load", finished_phases={"place": 2.5}), now=10.0)
    totals.push(engine("a"), MetricsSnapshot(phase="load", finished_phases={"place": 2.5}), now=11.0)
    (status,) = totals.status(13.0)
    assert (status.phase, status.phase_seconds, status.finished_phases) == ("load", 3.0, {"place": 2.5})
    assert not status.up
    started = running(0.0)
    started.finished_phases = {"place": 2.5, "load": 4.0}
    totals.push(engine("a"), started, now=14.0)
    (status,) = totals.status(14.0)
    assert (status.phase, status.phase_seconds, status.up) == (None, 0.0, True)
    phases = {s.key[1]: s.value for s in totals.samples(14.0) if s.key[0] == "startup_phase_seconds"}
    assert phases == {"place": 2.5, "load": 4.0}


def test_what_is_remembered_of_dead_sources_is_bounded_in_time() -> None:
    totals = ServiceTotals(live_seconds=5.0, memory_seconds=60.0)
    for number in range(50):
        totals.push(engine(f"e{number}"), counted(1), now=100.0 * number)
    assert len(totals._pushed) == 1
    assert counter_sum(totals, 5000.0) == 50
