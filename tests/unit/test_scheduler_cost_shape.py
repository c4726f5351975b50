"""How the scheduler's work grows, counted in function calls; and what importing it loads."""

import subprocess
import sys
from types import FrameType

import pytest
from step_table import Rig


def calls_of_a_step(rig: Rig) -> int:
    """Function calls, built-in ones included, of schedule() and update_from_result() for one step."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    plan = rig.scheduler.schedule()
    sys.setprofile(None)
    assert plan is not None
    result = rig.worker.execute(plan)
    sys.setprofile(profile)
    rig.scheduler.update_from_result(plan, result)
    sys.setprofile(None)
    return count


def decoding_rig(num_decodes: int, context: int = 4, **config: int | str) -> Rig:
    rig = Rig(
        num_blocks=num_decodes * 40,
        max_model_len=128,
        max_num_batched_tokens=num_decodes * 128,
        max_num_seqs=num_decodes,
        **config,
    )
    for index in range(num_decodes):
        rig.add(f"r{index}", context)
    rig.step()
    return rig


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_decodes_cost_the_same_each_however_many_there_are(policy: str) -> None:
    few, many = (calls_of_a_step(decoding_rig(num_decodes, policy=policy)) for num_decodes in (16, 256))
    assert many < few * 16


def test_a_decode_costs_the_same_whatever_its_context() -> None:
    short, long = (calls_of_a_step(decoding_rig(16, context)) for context in (4, 88))
    assert short == long


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_full_house_does_not_look_at_the_queue(policy: str) -> None:
    counts = []
    for num_waiting in (1, 100):
        rig = decoding_rig(16, policy=policy)
        for index in range(num_waiting):
            rig.add(f"w{index}", 4)
        counts.append(calls_of_a_step(rig))
    assert counts[0] == counts[1]


def test_steps_carry_only_the_blocks_that_were_appended() -> None:
    rig = decoding_rig(4, context=60)
    plans = [rig.step() for _ in range(8)]
    assert [sum(map(len, plan.new_block_ids.values())) for plan in plans] == [4, 0, 0, 0, 4, 0, 0, 0]


def test_hashes_are_computed_once_and_not_far_beyond_a_miss() -> None:
    rig = Rig(num_blocks=40, max_model_len=128, max_num_batched_tokens=256, max_num_seqs=2)
    rig.add("runs", 120)
    request = rig.add("waits", 100)  # no room for it: it asks the cache again at every step
    rig.step()
    hashes = list(request.block_hashes)
    rig.step()
    assert len(hashes) == 16  # of 25 blocks
    assert all(now is before for now, before in zip(request.block_hashes, hashes, strict=True))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("max_num_partial_prefills", [1, 2])
def test_prompts_held_back_do_not_go_through_the_cache(policy: str, max_num_partial_prefills: int) -> None:
    counts = []
    for shared in (4, 60):
        rig = Rig(
            num_blocks=256,
            max_model_len=128,
            policy=policy,
            long_prefill_token_threshold=8,
            max_num_partial_prefills=max_num_partial_prefills,
        )
        prefix = list(range(100, 100 + shared))
        rig.add("decodes", 4, priority=9)
        rig.add("cached", prefix, max_tokens=1)
        rig.run(8)
        rig.add("long", 100)
        for index in range(50):
            rig.add(f"w{index}", [*prefix, *range(500, 560)], priority=1)
        rig.run(6)  # the first steps hash
        counts.append(calls_of_a_step(rig))
        assert len(rig.scheduler.waiting) == 50
    assert counts[1] < counts[0] + 100  # the first may go through it for all; fifty would take thousands


def test_importing_the_scheduler_loads_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import scheduler.scheduler;"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(names - sys.stdlib_module_names - {'scheduler'}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.strip() == "[]"
