"""The seam between the OpenAI API and whatever generates: all that `api` knows of an engine."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from scheduler.plan import RequestOutput
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits


class RequestStream(Protocol):
    """One accepted request. Iterate it to its end, or call `finish`; nothing else frees it."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Outputs in order, the last one with a finish_reason. Raises EngineError if the engine is lost."""

    def finish(self, reason: str) -> None:
        """Ask the engine to end it: "stop" at a stop string, "abort" when the client left. Idempotent.

        The stream then ends with that reason; tokens still on their way are dropped by the caller.
        """


class EngineClient(Protocol):
    """Hands requests to an engine and brings their tokens back."""

    async def limits(self, *, renew: bool = True) -> ModelLimits:
        """Limits of the engines behind this client, with `renew` such as are not too old.

        Raises EngineError while none is ready.
        """

    async def open(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Submit one choice; returns once an engine has accepted it.

        Raises RequestError when the engine refuses it, EngineError when none can take it in time.
        """
