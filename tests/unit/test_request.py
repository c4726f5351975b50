"""A request's token lists, its derived words and its states."""

import pytest

from scheduler.request import Request, RequestStatus, TokenView
from scheduler.sampling_params import SamplingParams


def make_request(num_prompt_tokens: int = 4, **fields: object) -> Request:
    return Request("r", range(num_prompt_tokens), SamplingParams(max_tokens=8), **fields)  # type: ignore[arg-type]


def test_the_one_mutator_keeps_all_lists_in_step() -> None:
    request = make_request()
    request.append_output_token_ids([7, 8])
    request.append_output_token_ids([9])
    assert list(request.prompt_token_ids) == [0, 1, 2, 3]
    assert request.output_token_ids == [7, 8, 9]
    assert request.all_token_ids == [0, 1, 2, 3, 7, 8, 9]
    assert request.num_tokens == 7
    assert request.max_num_tokens == 12


def test_the_prompt_is_a_copy() -> None:
    prompt = [1, 2]
    request = Request("r", prompt, SamplingParams(max_tokens=8))
    prompt.append(3)
    assert request.all_token_ids == request.prompt_token_ids == (1, 2)


@pytest.mark.parametrize("name", ["prompt_token_ids", "output_token_ids", "all_token_ids"])
def test_views_are_read_only(name: str) -> None:
    view = getattr(make_request(), name)
    for mutator in ("append", "extend", "pop", "clear", "insert", "__setitem__", "__delitem__"):
        assert not hasattr(view, mutator)


def test_a_view_follows_its_list_and_a_slice_does_not() -> None:
    token_ids = [1, 2, 3]
    view = TokenView(token_ids)
    part = view[1:]
    token_ids.append(4)
    assert (len(view), view[-1], list(view), part) == (4, 4, [1, 2, 3, 4], [2, 3])
    assert view == [1, 2, 3, 4]
    assert view != [1, 2, 3]
    assert view != 1


@pytest.mark.parametrize(
    ("num_computed", "num_placeholders", "is_decoding", "is_partial"),
    [
        (0, 0, False, True),
        (2, 0, False, True),
        (3, 0, True, True),
        (4, 0, True, False),
        (4, 1, True, False),
        (4, 2, False, False),
        (5, 2, True, False),
    ],
)
def test_decoding_and_partial_are_derived(
    num_computed: int, num_placeholders: int, is_decoding: bool, is_partial: bool
) -> None:
    request = make_request(num_prompt_tokens=4)
    request.num_computed_tokens = num_computed
    request.num_output_placeholders = num_placeholders
    assert (request.is_decoding, request.is_partial) == (is_decoding, is_partial)


def test_a_grammar_is_waited_for() -> None:
    assert make_request().status is RequestStatus.WAITING
    assert make_request(has_grammar=True).status is RequestStatus.WAITING_FOR_FSM


def test_finished_states() -> None:
    assert {status.name: status.value for status in RequestStatus if status.is_finished} == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
    }


def test_priority_order_is_value_then_resubmission_then_arrival_then_order_of_adding() -> None:
    keys = [(2, False, 0.0, 0), (1, True, 5.0, 1), (1, True, 3.0, 3), (1, True, 3.0, 2), (1, False, 9.0, 4)]
    requests = []
    for priority, is_new, arrival_time, arrival_index in keys:
        output = () if is_new else (7,)
        request = make_request(priority=priority, arrival_time=arrival_time, output_token_ids=output)
        request.arrival_index = arrival_index
        requests.append(request)
    assert [request.order_key for request in sorted(requests, key=lambda r: r.order_key)] == sorted(keys)
