"""Requests that wait, in the order of a policy, and what else that policy decides."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol

from scheduler.config import SchedulingPolicy
from scheduler.request import Request, RequestStatus

_order_key = attrgetter("order_key")


class RequestQueue(Protocol):
    """Waiting requests in policy order, and the policy's word on running ones."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""

    def put_back(self, request: Request) -> None:
        """Queue a request that was preempted, or skipped, where it belongs."""

    def peek(self) -> Request:
        """The head. Raises LookupError when empty."""

    def pop(self) -> Request:
        """Take the head out. Raises LookupError when empty."""

    def remove(self, request: Request) -> None:
        """Take out a queued request. Raises LookupError when it is not here."""

    def precedes(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting prompt is considered before a running chunk."""

    def sort(self, running: Iterable[Request]) -> list[Request]:
        """Running chunks, given in admission order, in the order in which they are scheduled."""

    def victim(self, running: Sequence[Request]) -> Request:
        """Which of the running requests, in admission order and at least one, gives way when blocks run out."""


class FCFSQueue:
    """First come, first served; a request put back becomes the head.

    The preempted stand at the head, the resubmitted behind them, then the new.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        if request.was_resubmitted:
            for other in [other for other in self if self._waits_behind(other, request)]:
                self._requests.move_to_end(other.request_id)

    def _waits_behind(self, other: Request, request: Request) -> bool:
        preempted = other.status is RequestStatus.PREEMPTED
        return not preempted and (not other.was_resubmitted, other.arrival_time) > (False, request.arrival_time)

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return self._requests[next(iter(self._requests), "")]

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def precedes(self, waiting: Request, running: Request) -> bool:
        return False

    def sort(self, running: Iterable[Request]) -> list[Request]:
        return list(running)

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]


class PriorityQueue:
    """Smaller priority value first, then earlier arrival; running chunks and waiting prompts share the order."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # sorted by order_key

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order_key)

    put_back = add

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order_key, key=_order_key)
        if index == len(self._requests) or self._requests[index] is not request:
            raise LookupError(f"request {request.request_id!r} is not in the queue")
        del self._requests[index]

    def precedes(self, waiting: Request, running: Request) -> bool:
        return waiting.order_key < running.order_key

    def sort(self, running: Iterable[Request]) -> list[Request]:
        return sorted(running, key=_order_key)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=_order_key)


def make_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue of the policy."""
    return FCFSQueue() if policy == "fcfs" else PriorityQueue()
