"""The live log of an engine's steps: who was in them, and whether any stream had to wait."""

from collections import deque
from collections.abc import Iterable

from cluster.links.messages import StepRecord
from scheduler.plan import RequestOutput, StepPlan, StepResult


class StepLog:
    """The last `size` steps. Fed in the order of the plans, by the engine's loop only.

    A request counts as decoding once it has sampled, until it ends or is preempted. All results
    before a plan's own have been recorded when the plan is, so this needs nothing of the scheduler,
    and a request whose last token was still in flight when the plan was made is not missed.
    """

    def __init__(self, size: int) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)
        self._decoding: set[str] = set()
        self._ended: set[str] = set()
        """Was decoding, has ended, and may still be in plans that were made before that was known."""
        self._last_received_at = 0.0

    def record(
        self,
        plan: StepPlan,
        result: StepResult,
        outputs: Iterable[RequestOutput],
        *,
        sent_ahead: bool,
        sent_at: float,
        received_at: float,
        stage_seconds: dict[str, float],
    ) -> StepRecord:
        """Add one step; `outputs` is what the scheduler made of its result, `stage_seconds` the engine's own."""
        scheduled = plan.num_scheduled_tokens
        self._decoding.difference_update(plan.preempted_request_ids)
        decodes = self._decoding & scheduled.keys()
        self._ended &= scheduled.keys()
        num_decode_tokens = sum(scheduled[request_id] for request_id in decodes | self._ended)
        record = StepRecord(
            epoch=plan.epoch,
            step_id=plan.step_id,
            num_requests=len(scheduled),
            num_decodes=len(decodes) + len(self._ended),
            num_decode_tokens=num_decode_tokens,
            num_chunk_tokens=sum(scheduled.values()) - num_decode_tokens,
            num_missed_decodes=len(self._decoding) - len(decodes),
            num_preempted=len(plan.preempted_request_ids),
            sent_ahead=sent_ahead,
            execute_seconds=result.execute_seconds,
            wall_seconds=received_at - max(sent_at, self._last_received_at),
            sent_at=sent_at,
            received_at=received_at,
            stage_seconds=result.stage_seconds | stage_seconds,
        )
        self._last_received_at = received_at
        self._records.append(record)
        for output in outputs:
            if output.finish_reason is not None:
                self.forget(output.request_id)
            elif output.new_token_ids:
                self._decoding.add(output.request_id)
        return record

    def start_over(self) -> None:
        """The ranks are new, and no request has sampled in them; plans that were in flight are void."""
        self._decoding.clear()
        self._ended.clear()

    def forget(self, request_id: str) -> None:
        """The request has ended, by a result or between steps."""
        if request_id in self._decoding:
            self._decoding.remove(request_id)
            self._ended.add(request_id)

    def tail(self, n: int) -> list[StepRecord]:
        """The last n steps, oldest first."""
        return list(self._records)[-n:] if n > 0 else []
