"""Finds the request that kills the ranks: tells the suspicion what happens, and holds whom it says."""

from collections.abc import Collection, Iterable

from scheduler.plan import RequestOutput
from scheduler.scheduler import Scheduler
from scheduler.suspicion import Suspicion


class Isolation:
    """Which requests may run while one of them may be poison. While nobody is suspected it costs nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._suspicion = Suspicion()

    def crashed(self, positions: dict[str, int]) -> list[str]:
        """The ranks were lost with these requests in flight. Returns those that are to be failed for it."""
        if not positions:
            return []
        convicted = self._suspicion.crashed(positions)
        self.update()
        return convicted

    def finished(self, request_ids: Collection[str]) -> None:
        """The ranks have finished a step of these; `observe` its outputs next."""
        self._suspicion.finished(request_ids)

    def observe(self, outputs: Iterable[RequestOutput]) -> None:
        """Requests have got on, or ended."""
        if not self._suspicion.is_active:
            return
        for output in outputs:
            request = self._scheduler.requests.get(output.request_id)
            if request is None:
                self._suspicion.forget(output.request_id)
            else:
                self._suspicion.progressed(output.request_id, request.num_tokens)
        self.update()

    def update(self) -> None:
        """Requests have come, or suspects are cleared: who is held follows from who is open."""
        self._scheduler.hold(self._suspicion.held(self._scheduler.requests.keys()))

    def added(self) -> None:
        """A request has come."""
        if self._suspicion.is_active:
            self.update()
