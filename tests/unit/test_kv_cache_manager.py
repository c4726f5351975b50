"""Block tables, prefix hits, hashes and publication."""

import subprocess
import sys

import pytest

from scheduler.kv_cache_manager import KVCacheManager
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams


def make_request(request_id: str, token_ids: list[int], **fields: object) -> Request:
    params = fields.pop("sampling_params", SamplingParams(max_tokens=8))
    return Request(request_id, token_ids, params, **fields)  # type: ignore[arg-type]


def compute(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Admit a request and let it compute its first tokens."""
    hit = kv.find_hit(request)
    kv.admit(request, hit)
    assert kv.allocate(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    kv.publish(request, num_tokens)


def test_tables_grow_by_whole_blocks() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("r", [1] * 20)
    kv.admit(request, [])
    assert len(kv.allocate(request, 5) or ()) == 2
    assert kv.allocate(request, 8) == ()
    assert len(kv.allocate(request, 9) or ()) == 1
    assert kv.num_owed_blocks(request) == 2
    assert kv.capacity(request) == 16


def test_allocation_is_all_or_nothing() -> None:
    kv = KVCacheManager(num_blocks=2, block_size=4)
    request = make_request("r", [1] * 20)
    kv.admit(request, [])
    assert kv.allocate(request, 9) is None
    assert (kv.tables["r"], kv.block_pool.num_free_blocks) == ([], 2)


@pytest.mark.parametrize(("num_tokens", "num_hit_blocks"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (40, 2)])
def test_a_hit_leaves_at_least_one_token(num_tokens: int, num_hit_blocks: int) -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    compute(kv, make_request("first", list(range(11))), 11)
    second = make_request("second", [*range(11), *range(500, 540)][:num_tokens])
    assert kv.find_hit(second) == kv.tables["first"][:num_hit_blocks]


@pytest.mark.parametrize("num_cached_blocks", [0, 1, 16, 17, 20])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 32, 33, 40])
def test_one_look_never_denies_a_hit(num_cached_blocks: int, num_tokens: int) -> None:
    kv = KVCacheManager(num_blocks=64, block_size=2)
    second = make_request("second", list(range(45)))
    assert kv.may_hit(second, num_tokens)  # nothing is hashed yet
    kv.find_hit(second)
    assert not kv.may_hit(second, num_tokens)
    if num_cached_blocks:
        compute(kv, make_request("first", list(range(45))), 2 * num_cached_blocks)
    if 2 * len(kv.find_hit(second)) >= num_tokens:
        assert kv.may_hit(second, num_tokens)


def test_a_long_hit_is_followed_to_its_end() -> None:
    kv = KVCacheManager(num_blocks=64, block_size=2)
    compute(kv, make_request("first", list(range(90))), 90)
    second = make_request("second", list(range(90)))
    assert kv.find_hit(second) == kv.tables["first"][:44]
    assert len(second.block_hashes) == 44


def test_a_hit_ends_at_the_first_block_that_differs() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=2)
    compute(kv, make_request("first", [1, 2, 3, 4, 5, 6]), 6)
    assert len(kv.find_hit(make_request("same start", [1, 2, 9, 9, 5, 6, 7]))) == 1
    assert kv.find_hit(make_request("same middle", [9, 9, 3, 4, 5, 6, 7])) == []


def test_adapter_and_salt_keep_contents_apart() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=2)
    prompt = [1, 2, 3, 4, 5]
    compute(kv, make_request("r", prompt, lora_id="x"), 5)
    assert len(kv.find_hit(make_request("same", prompt, lora_id="x"))) == 2
    for fields in ({}, {"lora_id": "y"}, {"cache_salt": "x"}, {"lora_id": "x", "cache_salt": ""}):
        assert kv.find_hit(make_request("other", prompt, **fields)) == []


def test_odd_salts_are_ordinary_input() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=2)
    for index, salt in enumerate(["\0", "\ud800", "", "\U0001f600"]):
        request = make_request(f"r{index}", [1, 2, 3], cache_salt=salt)
        assert kv.find_hit(request) == []
        compute(kv, request, 3)


def test_prompt_logprobs_and_a_disabled_cache_never_hit() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=2)
    compute(kv, make_request("r", [1, 2, 3]), 3)
    assert kv.find_hit(make_request("plain", [1, 2, 3])) != []
    params = SamplingParams(max_tokens=1, num_prompt_logprobs=0)
    assert kv.find_hit(make_request("echo", [1, 2, 3], sampling_params=params)) == []
    disabled = KVCacheManager(num_blocks=16, block_size=2, enable_caching=False)
    compute(disabled, make_request("r", [1, 2, 3]), 3)
    assert disabled.find_hit(make_request("plain", [1, 2, 3])) == []


def test_only_full_blocks_are_published_each_once() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    request = make_request("r", list(range(20)))
    compute(kv, request, 7)
    assert request.num_published_blocks == 1
    assert kv.block_pool.block_hash(kv.tables["r"][1]) is None
    kv.allocate(request, 12)
    kv.publish(request, 12)
    assert request.num_published_blocks == 3
    kv.publish(request, 4)
    assert request.num_published_blocks == 3


def test_blocks_are_freed_from_the_tail() -> None:
    kv = KVCacheManager(num_blocks=3, block_size=2)
    request = make_request("r", [1, 2, 3, 4, 5, 6])
    compute(kv, request, 6)
    table = list(kv.tables["r"])
    kv.free(request)
    assert "r" not in kv.tables
    assert request.num_published_blocks == 0
    assert kv.block_pool.allocate(3) == table[::-1]


def test_withdrawal_reaches_shared_blocks() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=2)
    first, second = make_request("first", [1, 2, 3]), make_request("second", [1, 2, 4])
    compute(kv, first, 3)
    compute(kv, second, 3)
    assert kv.tables["first"][0] == kv.tables["second"][0]
    kv.withdraw(second)
    assert kv.find_hit(make_request("third", [1, 2, 5])) == []
    kv.check_integrity({"first": first, "second": second})


def test_withdrawn_blocks_are_not_published_again_by_those_who_share_them() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=2)
    first, second = make_request("first", [1, 2, 3]), make_request("second", [1, 2, 4, 5, 6])
    compute(kv, first, 3)
    kv.admit(second, kv.find_hit(second))
    kv.allocate(second, 5)
    kv.withdraw(first)
    kv.publish(second, 5)
    assert kv.find_hit(make_request("third", [1, 2, 4, 5, 7])) == []


def test_integrity_compares_cached_content_and_capacity() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=2)
    request = make_request("r", [1, 2, 3, 4])
    compute(kv, request, 4)
    kv.check_integrity({"r": request})
    request.num_computed_tokens = 5
    with pytest.raises(AssertionError, match="has only 2 blocks"):
        kv.check_integrity({"r": request})
    request.num_computed_tokens = 4
    request.block_hashes[1] = b"other"
    with pytest.raises(AssertionError, match="hash of other content"):
        kv.check_integrity({"r": request})


HASHES = """
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
request = Request("r", range(9), SamplingParams(max_tokens=1), lora_id="a", cache_salt="s")
KVCacheManager(num_blocks=4, block_size=4).find_hit(request)
print([block_hash.hex() for block_hash in request.block_hashes])
"""


def test_hashes_are_the_same_in_every_process() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", HASHES],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]
    # Written down, so that a change of the hash is a decision.
    expected = "['10ee5b188313f271ba65192bfe332593', '710c29cab990717144757b6da9befb81']\n"
    assert runs == [expected, expected]
