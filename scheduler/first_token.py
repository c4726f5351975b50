"""How long a request that comes now would wait for its first token, its own prompt aside."""

from dataclasses import dataclass

from scheduler.latency_model import LatencyModel
from scheduler.plan import StepLoad
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class QueueState:
    """What stands before a new request."""

    num_queued_tokens: int
    """Owed by waiting requests and running chunks before their next output."""
    num_waiting: int
    num_running: int
    num_decodes: int
    """Of the running requests, those that take one token of each step's budget."""
    decode_context: int
    """Tokens that these attend to, together."""
    max_num_seqs: int
    output_tokens: float
    """What a request generates before it gives its seat back, on average."""


def queue_state(scheduler: Scheduler) -> QueueState:
    """As of now, cache hits aside. Goes through all requests: to be asked once an arrival, not once a step.

    Until a request has ended by itself, answers are thought to be as long as they may become.
    """
    decodes = [request.num_tokens for request in scheduler.running if request.is_decoding]
    mean = scheduler.mean_output_tokens
    if mean is None:
        mean = sum(request.max_tokens for request in scheduler.running) / max(1, len(scheduler.running))
    return QueueState(
        num_queued_tokens=num_queued_tokens(scheduler),
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_decodes=len(decodes),
        decode_context=sum(decodes),
        max_num_seqs=scheduler.config.max_num_seqs,
        output_tokens=mean,
    )


def num_queued_tokens(scheduler: Scheduler) -> int:
    """Tokens that waiting requests and running chunks owe before their next output."""
    waiting = sum(request.num_tokens for request in scheduler.waiting)
    chunks = (request for request in scheduler.running if not request.is_decoding)
    return waiting + sum(request.num_tokens - request.num_computed_tokens for request in chunks)


def first_token_seconds(queue: QueueState, model: LatencyModel, recovery_seconds: float = 0.0) -> float:
    """Seconds; 0 where nothing is known of the time of steps, or nothing stands before it.

    Two things are waited for at once, and the longer one counts: that prompts ahead are computed, on the budget that
    decodes leave, and that enough seats are given back. With every seat taken one comes free each time an average
    answer's steps have passed, over the number of seats (Little's law). Before both `recovery_seconds` pass.
    """
    prefill = queue.num_queued_tokens / model.prefill_rate(queue.num_decodes, queue.decode_context)
    missing = queue.num_running + queue.num_waiting + 1 - queue.max_num_seqs
    step = model.predict(StepLoad(queue.num_decodes, 0, queue.decode_context, 0))
    seats = max(0, missing) * queue.output_tokens * step / queue.max_num_seqs
    return recovery_seconds + max(prefill, seats)
