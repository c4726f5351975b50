"""Plans as tensors: row order, positions, slots, which rows are read, and no padding."""

import pytest
import torch

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams
from workers.batch import Batch, build
from workers.request_state import PlanError, RequestState


def request(request_id: str, tokens: range, computed: int, blocks: list[int], **params: int) -> NewRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, **params)
    return NewRequest(request_id, list(tokens), len(tokens), sampling, blocks, computed)


def batch_of(state: RequestState, plan: StepPlan) -> Batch:
    state.apply_plan(plan)
    return build(plan, state)


def test_chunk_decode_and_prompt_in_one_ragged_batch() -> None:
    # Query lengths 1024, 1, 128 with contexts 1024, 2048, 0 before the step.
    state = RequestState(4, 4096, 16, torch.device("cpu"))
    batch = batch_of(
        state,
        StepPlan(
            0,
            0,
            {"chunk": 1024, "decode": 1, "prompt": 128},
            new_requests=[
                request("prompt", range(128), 0, list(range(300, 308))),
                request("chunk", range(3000), 1024, list(range(128))),
                request("decode", range(10_000, 12_049), 2048, list(range(128, 257))),
            ],
        ),
    )
    metadata = batch.metadata
    assert metadata.query_start_loc.tolist() == [0, 1024, 1025, 1153]
    assert metadata.seq_lens.tolist() == [2048, 2049, 128]
    assert (metadata.max_query_len, metadata.max_seq_len) == (1024, 2049)
    assert (metadata.host_query_lens, metadata.host_seq_lens) == ([1024, 1, 128], [2048, 2049, 128])
    assert batch.input_ids.shape == batch.positions.shape == metadata.slot_mapping.shape == (1153,)
    assert batch.input_ids.tolist() == [*range(1024, 2048), 12_048, *range(128)]
    assert batch.positions.tolist() == [*range(1024, 2048), 2048, *range(128)]
    assert metadata.slot_mapping.tolist() == [*range(1024, 2048), 256 * 16, *range(4800, 4928)]
    assert metadata.block_table.shape == (3, 129)
    assert metadata.block_table[1].tolist() == list(range(128, 257))
    # The chunk is partial: the decode and the whole prompt sample, each from its last row.
    assert batch.sampling_rows.rows.tolist() == [1024, 1152]
    assert batch.sampling_rows.requests.tolist() == [1, 2]
    assert batch.sampling_rows.context_lens.tolist() == [2049, 128]
    assert len(batch.prompt_rows) == 0


def test_drafts_have_a_row_each_and_the_token_after_them_one() -> None:
    state = RequestState(4, 64, 4, torch.device("cpu"))
    batch = batch_of(
        state,
        StepPlan(
            0,
            0,
            {"a": 1, "b": 4, "c": 2},
            new_requests=[
                request("a", range(5), 4, [0, 1]),
                request("b", range(10, 17), 6, [2, 9, 4]),
                request("c", range(5), 0, [5]),
            ],
            spec_token_ids={"b": [70, 71, 72]},
        ),
    )
    assert batch.input_ids.tolist() == [4, 16, 70, 71, 72, 0, 1]
    assert batch.metadata.slot_mapping.tolist() == [4, 38, 39, 16, 17, 20, 21]
    assert batch.sampling_rows.rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.sampling_rows.requests.tolist() == [0, 1, 1, 1, 1]
    assert batch.sampling_rows.context_lens.tolist() == [5, 7, 8, 9, 10]


def test_prompt_rows_score_the_token_after_them_up_to_the_prompts_end() -> None:
    state = RequestState(4, 64, 4, torch.device("cpu"))
    first = StepPlan(
        0,
        0,
        {"silent": 3, "echo": 3},
        new_requests=[
            request("silent", range(4), 0, [0]),
            request("echo", range(5), 0, [1, 2], num_prompt_logprobs=1),
        ],
    )
    batch = batch_of(state, first)
    assert batch.prompt_rows.rows.tolist() == [3, 4, 5]
    assert batch.prompt_rows.context_lens.tolist() == [1, 2, 3]
    state.apply_result(batch.slots, batch.seq_lens)
    batch = batch_of(state, StepPlan(0, 1, {"echo": 2}))
    assert batch.prompt_rows.rows.tolist() == [0]
    assert batch.prompt_rows.context_lens.tolist() == [4]
    assert batch.sampling_rows.rows.tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_scheduled_tokens": {}}, "schedules nothing"),
        ({"num_scheduled_tokens": {"a": 0}}, "no token"),
        ({"num_scheduled_tokens": {"b": 1}}, "'b' is not held"),
        ({"num_scheduled_tokens": {"a": 6}}, "more tokens than are known: request 'a', 6 scheduled after 0"),
        ({"num_scheduled_tokens": {"a": 5}, "spec_token_ids": {"a": [1]}}, "drafts' end"),
        ({"num_scheduled_tokens": {"a": 9}, "spec_token_ids": {"a": [1, 2, 3, 4]}}, "beyond its block table"),
    ],
)
def test_a_plan_that_cannot_be_built_is_an_error(changes: dict[str, dict[str, object]], message: str) -> None:
    state = RequestState(2, 12, 4, torch.device("cpu"))
    plan = StepPlan(0, 0, **{"num_scheduled_tokens": {}, **changes})  # type: ignore[arg-type]
    plan.new_requests.append(request("a", range(5), 0, [0, 1]))
    with pytest.raises(PlanError, match=message):
        batch_of(state, plan)


def test_a_request_whose_drafts_are_unverified_is_not_scheduled() -> None:
    state = RequestState(2, 12, 4, torch.device("cpu"))
    plan = StepPlan(0, 0, {"a": 6}, new_requests=[request("a", range(5), 0, [0, 1])], spec_token_ids={"a": [1]})
    batch = batch_of(state, plan)
    state.apply_result(batch.slots, batch.seq_lens)
    with pytest.raises(PlanError, match="before the drafts of an earlier step were verified"):
        batch_of(state, StepPlan(0, 1, {"a": 1}))
