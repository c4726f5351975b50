"""Waiting order under both policies, and the policy's word on chunks and victims."""

import pytest

from scheduler.request import Request
from scheduler.request_queue import FCFSQueue, PriorityQueue, RequestQueue, make_queue
from scheduler.sampling_params import SamplingParams


def make_request(request_id: str, priority: int = 0, arrival_time: float = 0.0) -> Request:
    request = Request(request_id, [1], SamplingParams(max_tokens=1), arrival_time, priority)
    request.arrival_index = int(request_id)
    return request


def ids(requests: object) -> list[str]:
    return [request.request_id for request in requests]  # type: ignore[attr-defined]


@pytest.fixture(params=[FCFSQueue, PriorityQueue])
def queue(request: pytest.FixtureRequest) -> RequestQueue:
    empty: RequestQueue = request.param()
    return empty


def test_equal_requests_leave_in_the_order_of_arrival(queue: RequestQueue) -> None:
    for index in range(4):
        queue.add(make_request(str(index)))
    assert len(queue) == 4
    assert queue.peek().request_id == "0"
    assert [queue.pop().request_id for _ in range(4)] == ["0", "1", "2", "3"]
    assert not queue


def test_any_request_can_be_removed(queue: RequestQueue) -> None:
    requests = [make_request(str(index)) for index in range(4)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[2])
    queue.remove(requests[0])
    assert ids(queue) == ["1", "3"]
    with pytest.raises(LookupError):
        queue.remove(requests[2])


def test_an_empty_queue_has_no_head(queue: RequestQueue) -> None:
    with pytest.raises(LookupError):
        queue.peek()
    with pytest.raises(LookupError):
        queue.pop()


def test_fcfs_puts_back_at_the_head() -> None:
    queue = FCFSQueue()
    for name in ("3", "4"):
        queue.add(make_request(name, priority=-int(name)))
    queue.put_back(make_request("2"))
    queue.put_back(make_request("1"))
    assert ids(queue) == ["1", "2", "3", "4"]


def test_fcfs_runs_chunks_first_and_preempts_the_last_admitted() -> None:
    queue = FCFSQueue()
    running = [make_request("5", priority=9), make_request("6", priority=1)]
    assert not queue.precedes(make_request("0", priority=-1), running[0])
    assert queue.sort(running) == running
    assert queue.victim(running) is running[1]


def test_priority_orders_by_value_then_arrival() -> None:
    queue = PriorityQueue()
    queue.add(make_request("0", priority=1, arrival_time=2.0))
    queue.add(make_request("1", priority=0, arrival_time=9.0))
    queue.add(make_request("2", priority=1, arrival_time=1.0))
    queue.put_back(make_request("3", priority=1, arrival_time=1.5))
    assert ids(queue) == ["1", "2", "3", "0"]


def test_priority_has_one_order_for_chunks_and_prompts_and_preempts_its_end() -> None:
    queue = PriorityQueue()
    running = [make_request("0", priority=5), make_request("1", priority=9), make_request("2", priority=1)]
    assert ids(queue.sort(running)) == ["2", "0", "1"]
    assert queue.precedes(make_request("3", priority=4), running[0])
    assert not queue.precedes(make_request("4", priority=5), running[0])
    assert queue.victim(running) is running[1]


def test_each_policy_has_its_queue() -> None:
    assert isinstance(make_queue("fcfs"), FCFSQueue)
    assert isinstance(make_queue("priority"), PriorityQueue)
