"""What every engine behind a Serve handle says of itself."""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.awake import awake_timeout
from cluster.errors import EngineError
from cluster.links.messages import EngineStatus

_HANGS = EngineStatus(False, False, "an engine does not answer")


async def ask_statuses(handle: Any, seconds: float) -> list[EngineStatus]:
    """One for each engine that runs. One that does not answer within `seconds` hangs; one that has died tells nothing.

    Raises EngineError while none runs.
    """
    try:
        async with awake_timeout(seconds):
            # A broadcast's own way to its results is all or nothing: one engine that hangs would hide the others.
            replies = await handle.broadcast("status")._fetch_replica_results_async()
    except (RayError, RayServeException, RuntimeError) as error:
        raise EngineError(f"no engine runs: {type(error).__name__}") from error
    except TimeoutError:
        raise EngineError(f"no engine was found within {seconds:g} s") from None
    answers = [asyncio.ensure_future(reply.get_async()) for reply in replies]
    done, hanging = await asyncio.wait(answers, timeout=seconds)
    for answer in hanging:
        answer.cancel()
    told = [each.result() for each in done if not each.cancelled() and each.exception() is None]
    return told + [_HANGS] * len(hanging)
