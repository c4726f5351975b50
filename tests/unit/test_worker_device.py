"""Choosing a device, its dtype and its threads."""

from pathlib import Path

import numpy as np
import pytest
import torch

from scheduler.plan import StepLoad
from workers.device import available_cores, cpu_has_bfloat16, select_device, select_dtype, to_device
from workers.rehearsal import blocks_for, full_step, profile_steps, small_steps, spread

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_named_dtype_is_taken_and_auto_follows_the_device() -> None:
    assert select_dtype("float16", CPU, torch.float32) == torch.float16
    assert select_dtype("auto", CUDA, torch.float16) == torch.float16
    native = torch.bfloat16 if cpu_has_bfloat16(Path("/proc/cpuinfo")) else torch.float32
    assert select_dtype("auto", CPU, torch.float16) == native


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512_bf16 sse", True), ("amx_bf16 amx_tile", True), ("avx512f avx512_bf16x", False), ("", False)],
)
def test_bfloat16_needs_its_instructions(tmp_path: Path, flags: str, expected: bool) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: amx_bf16\nflags\t\t: {flags}\n")
    assert cpu_has_bfloat16(info) is expected
    assert not cpu_has_bfloat16(tmp_path / "missing")


def test_cores_respect_a_containers_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    cores = available_cores(tmp_path / "missing")
    assert cores >= 1
    for text, expected in (("max 100000\n", cores), ("100000 100000\n", 1), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert available_cores(quota) == expected


def test_cpu_is_taken_when_asked_for_and_arrays_arrive_there() -> None:
    assert select_device("cpu", 3) == CPU
    assert to_device(np.array([3, 1]), CPU).tolist() == [3, 1]


def test_a_full_step_fills_the_budget_within_the_longest_sequence() -> None:
    assert spread(10, 4, 100) == [3, 3, 2, 2]
    assert spread(2, 4, 100) == [1, 1]
    assert spread(100, 3, 20) == [20, 20, 20]
    plan = full_step([5, 4], block_size=4)
    assert blocks_for([5, 4], 4) == 3
    assert [new.block_ids for new in plan.new_requests] == [[0, 1], [2]]
    assert list(plan.num_scheduled_tokens.values()) == [5, 4]


def test_small_steps_stay_within_small_limits() -> None:
    first, second = small_steps(2, 4, 100, 2, 100)
    assert list(first.num_scheduled_tokens.values()) == [3]
    assert list(second.num_scheduled_tokens.values()) == [1, 3]
    assert len(small_steps(1, 4, 100, 2, 100)) == 1
    assert small_steps(8, 4, 100, 2, 1) == []


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("budget", [1, 8, 256])
@pytest.mark.parametrize("max_model_len", [2, 20, 500])
def test_profile_stays_within_limits_and_says_what_it_computes(
    block_size: int, num_blocks: int, budget: int, max_model_len: int
) -> None:
    computed: dict[str, int] = {}
    blocks: dict[str, list[int]] = {}
    for plan, load in profile_steps(num_blocks, block_size, budget, 8, min(max_model_len, num_blocks * block_size)):
        blocks |= {new.request_id: new.block_ids for new in plan.new_requests}
        assert sum(plan.num_scheduled_tokens.values()) <= budget
        decodes = decode_context = chunk_tokens = pairs = 0
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            before = computed.get(request_id, 0)
            contexts = range(before + 1, before + num_tokens + 1)
            computed[request_id] = before + num_tokens
            if num_tokens == 1 and before:
                decodes, decode_context = decodes + 1, decode_context + sum(contexts)
            else:
                chunk_tokens, pairs = chunk_tokens + num_tokens, pairs + sum(contexts)
            assert computed[request_id] < max_model_len
            assert computed[request_id] <= len(blocks[request_id]) * block_size
        assert load == StepLoad(decodes, chunk_tokens, decode_context, pairs)
    used = [block_id for block_ids in blocks.values() for block_id in block_ids]
    assert len(used) == len(set(used))
    assert max(used, default=0) < num_blocks


def test_profile_has_every_kind_of_step() -> None:
    loads = [load for _, load in profile_steps(64, 16, 250, 8, 512)]
    assert {(bool(load.num_decode_tokens), bool(load.num_chunk_tokens)) for load in loads} == {
        (True, False),
        (False, True),
    }
    assert len(loads) == 5
