"""The service's totals: what all pushes add up to, whoever pushed, restarted or died."""

from dataclasses import dataclass, field

from cluster.metrics.snapshot import HistogramTotals, MetricsSnapshot, MetricsSource, SeriesKey, SourceRole

LIVE_SECONDS = 5.0
"""A source that has not pushed for this long is dead: five pushes missed."""
MEMORY_SECONDS = 3600.0
"""A dead source is remembered this long, so that what it says when it comes back is not counted twice."""


@dataclass(slots=True)
class Sample:
    """One value to show, under one engine label ("" for front ends)."""

    engine: str
    model_name: str
    key: SeriesKey
    value: float | HistogramTotals


@dataclass(slots=True)
class SourceStatus:
    """What is known of one living source."""

    source_id: str
    role: SourceRole
    engine: str
    phase: str | None
    """The start-up phase it is in; None when it has started."""
    phase_seconds: float
    """Seconds it has been in that phase, to within a push; 0.0 if in none."""
    finished_phases: dict[str, float]
    """Seconds each finished phase took, in order."""
    up: bool
    """An engine: it serves. A front end: it pushes."""


@dataclass(slots=True)
class _Source:
    """One source id: its newest epoch, the place it counts under, and when it last spoke."""

    source: MetricsSource
    engine: str
    seen_at: float
    gauges: dict[SeriesKey, float] = field(default_factory=dict)
    phase: str | None = None
    phase_seen_at: float = 0.0
    """When it was first said to be in that phase."""
    finished_phases: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Pushed:
    """The last totals that one epoch of a source pushed."""

    seen_at: float
    snapshot: MetricsSnapshot = field(default_factory=MetricsSnapshot)


class ServiceTotals:
    """Merges pushes. Times are seconds of one monotonic clock, given by the caller.

    An engine gets the lowest number that no living engine has, as its `engine` label: a replacement
    counts on under its predecessor's number, so no series ends with a process and none falls.
    Sources push totals since their epoch began; what is added is the difference to the last push of
    the same epoch, so a repeated or late push adds nothing twice.
    """

    def __init__(self, live_seconds: float = LIVE_SECONDS, memory_seconds: float = MEMORY_SECONDS) -> None:
        self._live_seconds = live_seconds
        self._memory_seconds = memory_seconds
        self._sources: dict[str, _Source] = {}
        self._pushed: dict[tuple[str, int], _Pushed] = {}
        self._counters: dict[tuple[str, str, SeriesKey], float] = {}
        self._histograms: dict[tuple[str, str, SeriesKey], HistogramTotals] = {}
        self._lost: dict[str, MetricsSource] = {}
        """Engine label -> the engine that fell silent under it and was not replaced."""

    # Writing

    def push(self, source: MetricsSource, snapshot: MetricsSnapshot, now: float) -> None:
        """Add what `snapshot` has beyond the last push of this source and epoch; replace its gauges."""
        known = self._seen(source, now)
        if known.source.epoch == source.epoch:
            known.gauges = snapshot.gauges
            known.finished_phases = snapshot.finished_phases
            if known.phase != snapshot.phase:
                known.phase, known.phase_seen_at = snapshot.phase, now
        last = self._pushed.setdefault((source.source_id, source.epoch), _Pushed(now))
        last.seen_at = now
        place = (source.model_name, known.engine)
        for key, total in snapshot.counters.items():
            before = last.snapshot.counters.get(key, 0.0)
            at = (*place, key)
            self._counters[at] = self._counters.get(at, 0.0) + max(0.0, total - before)
            last.snapshot.counters[key] = max(total, before)
        for key, totals in snapshot.histograms.items():
            self._add_histogram((*place, key), totals, last.snapshot.histograms)

    def _add_histogram(
        self, at: tuple[str, str, SeriesKey], totals: HistogramTotals, last: dict[SeriesKey, HistogramTotals]
    ) -> None:
        key = at[2]
        before = last.get(key)
        into = self._histograms.setdefault(at, HistogramTotals([0] * len(totals.counts)))
        if before is None:
            before = HistogramTotals([0] * len(totals.counts))
        if sum(totals.counts) < sum(before.counts):
            return  # An older push that arrived late.
        into.counts = [
            count + new - old for count, new, old in zip(into.counts, totals.counts, before.counts, strict=True)
        ]
        into.sum += max(0.0, totals.sum - before.sum)
        last[key] = totals

    def leave(self, source_id: str, now: float) -> None:
        """A source stops on purpose: its gauges go at once, and its engine is not reported as lost."""
        self._forget_silent(now)
        self._sources.pop(source_id, None)

    def _seen(self, source: MetricsSource, now: float) -> _Source:
        self._forget_silent(now)
        known = self._sources.get(source.source_id)
        if known is None:
            known = _Source(source, self._free_label(source), now)
            self._sources[source.source_id] = known
            self._lost.pop(known.engine, None)
        elif source.epoch > known.source.epoch:
            known = _Source(source, known.engine, now)
            self._sources[source.source_id] = known
        known.seen_at = max(known.seen_at, now)
        return known

    def _free_label(self, source: MetricsSource) -> str:
        if source.role != "engine":
            return ""
        for engine, lost in self._lost.items():
            if lost.source_id == source.source_id:
                return engine  # It was only slow.
        taken = {known.engine for known in self._sources.values()}
        number = 0
        while str(number) in taken:
            number += 1
        return str(number)

    def _forget_silent(self, now: float) -> None:
        for source_id, known in list(self._sources.items()):
            if now - known.seen_at > self._live_seconds:
                del self._sources[source_id]
                if known.source.role == "engine":
                    self._lost[known.engine] = known.source
        for key, pushed in list(self._pushed.items()):
            if key[0] not in self._sources and now - pushed.seen_at > self._memory_seconds:
                del self._pushed[key]

    # Reading

    def samples(self, now: float) -> list[Sample]:
        """Every value of the service. Gauges of front ends are summed; those of the dead are gone."""
        self._forget_silent(now)
        samples = [Sample(engine, model, key, value) for (model, engine, key), value in self._counters.items()]
        samples += [Sample(engine, model, key, totals) for (model, engine, key), totals in self._histograms.items()]
        gauges: dict[tuple[str, str, SeriesKey], float] = {
            (lost.model_name, engine, ("engine_up",)): 0.0 for engine, lost in self._lost.items()
        }
        for known in self._sources.values():
            place = (known.source.model_name, known.engine)
            if known.source.role == "engine":
                gauges[(*place, ("engine_up",))] = 0.0
            for key, value in known.gauges.items():
                gauges[(*place, key)] = gauges.get((*place, key), 0.0) + value
            for phase, seconds in known.finished_phases.items():
                gauges[(*place, ("startup_phase_seconds", phase))] = seconds
        samples += [Sample(engine, model, key, value) for (model, engine, key), value in gauges.items()]
        return samples

    def status(self, now: float) -> list[SourceStatus]:
        """Every living source and its start-up phase, engines by number first."""
        self._forget_silent(now)
        statuses = [
            SourceStatus(
                source_id=known.source.source_id,
                role=known.source.role,
                engine=known.engine,
                phase=known.phase,
                phase_seconds=now - known.phase_seen_at if known.phase is not None else 0.0,
                finished_phases=dict(known.finished_phases),
                up=known.source.role != "engine" or known.gauges.get(("engine_up",), 0.0) > 0,
            )
            for known in self._sources.values()
        ]
        return sorted(statuses, key=lambda status: (status.role, int(status.engine or 0), status.source_id))
