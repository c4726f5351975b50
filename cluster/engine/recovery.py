"""A lost executor is brought back: every rank ended and started anew, several times if need be."""

import asyncio
import logging
import time

from cluster.awake import awake_timeout
from cluster.engine.executor import Executor, NoRoom
from cluster.errors import ExecutorError

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_PAUSE_SECONDS = 1.0
"""Between two attempts."""


async def recover(executor: Executor, loss: ExecutorError, seconds: float) -> float:
    """Restart the executor after `loss`. Returns the seconds it took.

    Raises ExecutorError, with the last attempt's cause, after five attempts or `seconds`, or when there is no room.
    """
    began = time.monotonic()
    last = loss
    try:
        async with awake_timeout(seconds):
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    await executor.restart()
                    return time.monotonic() - began
                except NoRoom as error:
                    raise ExecutorError(f"the ranks have no room after {loss}: {error}", "startup") from error
                except ExecutorError as error:
                    last = error
                    logger.warning("attempt %d of %d to restart the ranks failed: %s", attempt, _ATTEMPTS, error)
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        raise ExecutorError(f"the ranks did not come back within {seconds:g} s of {loss}; last: {last}") from last
    raise ExecutorError(f"the ranks did not come back in {_ATTEMPTS} attempts after {loss}; last: {last}") from last
