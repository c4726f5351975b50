"""An executor without a model or a process: the next token is a function of all tokens before it."""

import asyncio
from collections import deque
from collections.abc import Awaitable

from cluster.errors import ExecutorError
from scheduler.plan import StepPlan, StepResult
from workers.config import ModelLimits

VOCAB_SIZE = 101
LIMITS = ModelLimits(num_blocks=64, block_size=4, max_model_len=128, vocab_size=VOCAB_SIZE)


def next_token(token_ids: list[int]) -> int:
    value = len(token_ids)
    for token_id in token_ids:
        value = (value * 31 + token_id) % 10_007
    return value % VOCAB_SIZE


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FakeModel:
    """Mirrors requests from plans alone, as a rank does."""

    def __init__(self) -> None:
        self._token_ids: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    def computes(self, token_id: int | None, plan: StepPlan) -> bool:
        """Whether the plan, which was executed, has computed this token."""
        return any(
            token_id
            in self._token_ids[request_id][self._computed[request_id] - num_tokens : self._computed[request_id]]
            for request_id, num_tokens in plan.num_scheduled_tokens.items()
        )

    def execute_step(self, plan: StepPlan) -> StepResult:
        for request_id in plan.finished_request_ids + plan.preempted_request_ids:
            self._token_ids.pop(request_id)
        for new in plan.new_requests:
            self._token_ids[new.request_id] = list(new.token_ids)
            self._computed[new.request_id] = new.num_computed_tokens
        sampled = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            token_ids = self._token_ids[request_id]
            self._computed[request_id] += num_tokens
            assert self._computed[request_id] <= len(token_ids)
            if self._computed[request_id] == len(token_ids):
                token_ids.append(next_token(token_ids))
                sampled[request_id] = [token_ids[-1]]
        return StepResult(plan.epoch, plan.step_id, sampled, execute_seconds=0.001)


class FakeExecutor:
    """Gives results at the loop's next turn, or, with `manual`, when `release` is called.

    `poison`: a prompt token at which the ranks die, each time. Restarts wait for `may_restart`, and raise the
    errors in `restart_errors` first.
    """

    def __init__(
        self, *, manual: bool = False, start_error: Exception | None = None, poison: int | None = None
    ) -> None:
        self._manual = manual
        self._start_error = start_error
        self._poison = poison
        self.restart_errors: list[Exception] = []
        self.may_restart = asyncio.Event()
        self.may_restart.set()
        self.num_restarts = 0
        self._model = FakeModel()
        self._waiting: deque[tuple[asyncio.Future[StepResult], StepResult]] = deque()
        self._failure: ExecutorError | None = None
        self.plans: list[StepPlan] = []
        self.num_stops = 0

    async def start(self) -> ModelLimits:
        if self._start_error is not None:
            raise self._start_error
        return LIMITS

    async def restart(self) -> None:
        self.num_restarts += 1
        self.fail("restarted")
        await self.may_restart.wait()
        if self.restart_errors:
            raise self.restart_errors.pop(0)
        self._model, self._failure = FakeModel(), None

    def execute_step(self, plan: StepPlan, seconds: float) -> Awaitable[StepResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self.plans.append(plan)
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._waiting.append((future, self._model.execute_step(plan)))
        if self._model.computes(self._poison, plan):
            self.fail("rank 0 is gone: poisoned")
            return future
        if not self._manual:
            loop.call_soon(self.release)
        return future

    def release(self) -> None:
        """The oldest plan without a result gets it."""
        if self._waiting:
            future, result = self._waiting.popleft()
            future.set_result(result)

    def release_nonsense(self) -> None:
        """The oldest plan gets something that is no result."""
        future, _ = self._waiting.popleft()
        future.set_result(None)  # type: ignore[arg-type]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def fail(self, cause: str) -> None:
        """A rank dies."""
        self._failure = ExecutorError(cause, "worker_died")
        for future, _ in self._waiting:
            future.set_exception(self._failure)
        self._waiting.clear()

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def shutdown(self) -> None:
        self.num_stops += 1
        self.fail("shut down")
