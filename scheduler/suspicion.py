"""Which request kills the workers, found by halving those that could."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_STRIKES = 3
"""So many crashes alone convict one that was alone from the start."""


@dataclass(slots=True)
class _Suspect:
    position: int
    num_alone: int = 0
    """Crashes with nobody else in flight."""
    was_split_off: bool = False
    """It was suspected together with others, so one crash alone says enough."""
    is_controlled: bool = False
    """A step without it has finished since it became a suspect: the workers do run for others."""

    @property
    def has_struck(self) -> bool:
        return self.num_alone >= (1 if self.was_split_off else _STRIKES)


class Suspicion:
    """Suspects of crashes, in groups of which one at a time runs, alone.

    A position is the token that a request was computing, counted with its prompt; a suspect is cleared
    once it has more tokens than that. Among n requests in flight one that always crashes at the same
    position is convicted after 1 + ceil(log2(n)) crashes, and after 3 where that is more: a single death
    from outside must not fail one that was alone from the start.

    Nobody is convicted for what may be the workers' own fault. One that was split off needs a step without
    it as a control: until there is one, the others run before it. One that was alone may have nobody to run
    before it; then any step that ever finished will do.
    """

    def __init__(self) -> None:
        self._groups: deque[dict[str, _Suspect]] = deque()  # the first is under test
        self._has_finished_step = False

    @property
    def is_active(self) -> bool:
        """Whether anybody is suspected, and so others must be held."""
        return bool(self._groups)

    def crashed(self, in_flight: Mapping[str, int]) -> list[str]:
        """The workers died while these requests were at these positions. Returns the convicted (at most one).

        A conviction explains the crashes: all others are cleared.
        """
        known = {request_id: suspect for group in self._groups for request_id, suspect in group.items()}
        suspects = {}
        for request_id, position in in_flight.items():
            suspect = suspects[request_id] = known.get(request_id, _Suspect(position))
            suspect.position = max(suspect.position, position)
            if len(in_flight) > 1:
                suspect.was_split_off = True
            else:
                suspect.num_alone += 1
                if suspect.has_struck and self._is_proven(suspect):
                    self._groups.clear()
                    return [request_id]
            self.forget(request_id)
        ids = list(suspects)
        middle = (len(ids) + 1) // 2
        halves = [{name: suspects[name] for name in half} for half in (ids[:middle], ids[middle:]) if half]
        if all(suspect.is_controlled for suspect in suspects.values()):
            self._groups.extendleft(reversed(halves))
        else:
            self._groups.extend(halves)
        return []

    def _is_proven(self, suspect: _Suspect) -> bool:
        return suspect.is_controlled or (self._has_finished_step and not suspect.was_split_off)

    def finished(self, request_ids: Collection[str]) -> None:
        """The workers have finished a step of these: a control of every suspect that is not among them."""
        self._has_finished_step = True
        for group in self._groups:
            for request_id, suspect in group.items():
                if request_id not in request_ids:
                    suspect.is_controlled = True

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

        Where that group is one that lacks only a control, it is the suspects who wait, if anybody else is open.
        Suspects that are not open any more are forgotten, so that nobody waits for a group that is gone.
        """
        for request_id in [suspect for group in self._groups for suspect in group if suspect not in open_ids]:
            self.forget(request_id)
        if not self._groups:
            return set()
        suspects = {request_id for group in self._groups for request_id in group}
        lacks_control = all(suspect.has_struck and not self._is_proven(suspect) for suspect in self._groups[0].values())
        if lacks_control and len(suspects) < len(open_ids):
            return suspects
        return set(open_ids) - self._groups[0].keys()
