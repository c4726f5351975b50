"""The scheduler's books proved: run after every step in tests."""

from collections.abc import Iterable, Mapping, Sequence, Set

from scheduler.config import SchedulerConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.request import Request, RequestStatus


def check(
    config: SchedulerConfig,
    kv_cache_manager: KVCacheManager,
    requests: Mapping[str, Request],
    running: Sequence[Request],
    waiting: Iterable[Request],
    waiting_for_grammar: Set[str],
    num_plans_in_flight: int,
) -> None:
    """Raises AssertionError at the first lie, of the block pool or of the scheduler."""
    kv_cache_manager.check_integrity(requests)
    states = [(request, True) for request in running] + [(request, False) for request in waiting]
    if sorted(request.request_id for request, _ in states) != sorted(requests):
        raise AssertionError("running and waiting requests are not the known ones, each once")
    if len(running) > config.max_num_seqs:
        raise AssertionError(f"{len(running)} requests run, above max_num_seqs {config.max_num_seqs}")
    if kv_cache_manager.tables.keys() != {request.request_id for request in running}:
        raise AssertionError("block tables are not those of the running requests")
    num_chunks = sum(not request.is_decoding for request in running)
    limit = config.max_num_partial_prefills if config.enable_chunked_prefill else 0
    if num_chunks > limit:
        raise AssertionError(f"{num_chunks} partial prefills run, above the limit of {limit}")
    for request, runs in states:
        _check_request(request, runs, request.request_id in waiting_for_grammar, num_plans_in_flight)


def _check_request(request: Request, runs: bool, waits_for_grammar: bool, num_plans_in_flight: int) -> None:
    if (request.status is RequestStatus.RUNNING) != runs or request.status.is_finished:
        raise AssertionError(f"{request!r} is in the wrong queue")
    if waits_for_grammar != (request.status is RequestStatus.WAITING_FOR_FSM):
        raise AssertionError(f"{request!r} disagrees with the set that waits for grammars")
    if not runs and (request.num_computed_tokens or request.num_output_placeholders or request.spec_token_ids):
        raise AssertionError(f"{request!r} waits and keeps progress")
    if not 0 <= request.num_output_placeholders <= num_plans_in_flight:
        raise AssertionError(f"{request!r} expects more outputs than plans are in flight")
    if request.num_computed_tokens >= request.max_num_tokens or request.num_tokens >= request.max_num_tokens:
        raise AssertionError(f"{request!r} is past its limit of {request.max_num_tokens} tokens")
