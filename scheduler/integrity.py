"""The scheduler's books proved: run after every step in tests."""

from typing import TYPE_CHECKING

from scheduler.request import Request, RequestStatus

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler


def check(scheduler: "Scheduler") -> None:
    """Raises AssertionError at the first lie, of the block pool or of the scheduler."""
    scheduler.kv_cache_manager.check_integrity(scheduler.requests)
    states = [(request, True) for request in scheduler.running] + [(request, False) for request in scheduler.waiting]
    if sorted(request.request_id for request, _ in states) != sorted(scheduler.requests):
        raise AssertionError("running and waiting requests are not the known ones, each once")
    if len(scheduler.running) > scheduler.config.max_num_seqs:
        raise AssertionError(
            f"{len(scheduler.running)} requests run, above max_num_seqs {scheduler.config.max_num_seqs}"
        )
    if scheduler.kv_cache_manager.tables.keys() != {request.request_id for request in scheduler.running}:
        raise AssertionError("block tables are not those of the running requests")
    num_chunks = sum(not request.is_decoding for request in scheduler.running)
    limit = scheduler.config.max_num_partial_prefills if scheduler.config.enable_chunked_prefill else 0
    if num_chunks > limit:
        raise AssertionError(f"{num_chunks} partial prefills run, above the limit of {limit}")
    for request, runs in states:
        _check_request(scheduler, request, runs)


def _check_request(scheduler: "Scheduler", request: Request, runs: bool) -> None:
    if (request.status is RequestStatus.RUNNING) != runs or request.status.is_finished:
        raise AssertionError(f"{request!r} is in the wrong queue")
    if (request.request_id in scheduler.waiting_for_grammar) != (request.status is RequestStatus.WAITING_FOR_FSM):
        raise AssertionError(f"{request!r} disagrees with the set that waits for grammars")
    if not runs and (request.num_computed_tokens or request.num_output_placeholders or request.spec_token_ids):
        raise AssertionError(f"{request!r} waits and keeps progress")
    if not 0 <= request.num_output_placeholders <= scheduler.num_plans_in_flight:
        raise AssertionError(f"{request!r} expects more outputs than plans are in flight")
    if request.num_computed_tokens >= request.max_num_tokens or request.num_tokens >= request.max_num_tokens:
        raise AssertionError(f"{request!r} is past its limit of {request.max_num_tokens} tokens")
