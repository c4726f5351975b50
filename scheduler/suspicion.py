"""Which request kills the workers, found by halving those that could."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_STRIKES = 3
"""So many convict. One that was split off from others needs only one crash more, alone."""


@dataclass(slots=True)
class _Suspect:
    position: int
    strikes: int


class Suspicion:
    """Suspects of crashes, in groups of which one at a time runs, alone.

    A position is the token that a request was computing, counted with its prompt; a suspect is cleared
    once it has more tokens than that. Among n requests in flight one that always crashes at the same
    position is convicted after 1 + ceil(log2(n)) crashes, and after 3 if it was alone from the start:
    then a single death from outside must not fail it.
    """

    def __init__(self) -> None:
        self._groups: deque[dict[str, _Suspect]] = deque()  # the first is under test

    @property
    def is_active(self) -> bool:
        """Whether anybody is suspected, and so others must be held."""
        return bool(self._groups)

    def crashed(self, in_flight: Mapping[str, int]) -> list[str]:
        """The workers died while these requests were at these positions. Returns the convicted (at most one).

        A conviction explains the crashes: all others are cleared.
        """
        known = {request_id: suspect for group in self._groups for request_id, suspect in group.items()}
        least = _STRIKES - 1 if len(in_flight) > 1 else 0
        suspects = {}
        for request_id, position in in_flight.items():
            old = known.get(request_id, _Suspect(position, 0))
            strikes = old.strikes + 1 if len(in_flight) == 1 else max(old.strikes, least)
            suspects[request_id] = _Suspect(max(old.position, position), strikes)
            self.forget(request_id)
        convicted = [request_id for request_id, suspect in suspects.items() if suspect.strikes >= _STRIKES]
        if convicted:
            self._groups.clear()
            return convicted
        ids = list(suspects)
        middle = (len(ids) + 1) // 2
        for half in (ids[middle:], ids[:middle]):
            if half:
                self._groups.appendleft({request_id: suspects[request_id] for request_id in half})
        return []

    def progressed(self, request_id: str, num_tokens: int) -> None:
        """The request has this many tokens, prompt included: past its position it is cleared."""
        for group in self._groups:
            if request_id in group and num_tokens > group[request_id].position:
                self.forget(request_id)
                return

    def forget(self, request_id: str) -> None:
        """The request has ended, or is cleared."""
        for group in self._groups:
            group.pop(request_id, None)
        self._groups = deque(group for group in self._groups if group)

    def held(self, open_ids: Collection[str]) -> set[str]:
        """Those of the open requests that must not run now: all but the group under test.

        Suspects that are not open any more are forgotten, so that nobody waits for a group that is gone.
        """
        for request_id in [suspect for group in self._groups for suspect in group if suspect not in open_ids]:
            self.forget(request_id)
        if not self._groups:
            return set()
        return set(open_ids) - self._groups[0].keys()
