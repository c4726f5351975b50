"""Batches in a front end: the routes to them, and the task that runs them, which asks this front end itself."""

import asyncio
import logging
from pathlib import Path

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from cluster.batch.service import BatchService
from cluster.batch.store import BatchStore
from cluster.errors import ConfigError
from cluster.frontend.batch_routes import batch_router
from cluster.frontend.http_gate import TRUSTED
from cluster.frontend.protocol import MAX_PRIORITY
from cluster.frontend.settings import FrontendSettings

logger = logging.getLogger(__name__)

_BYTES_PER_MB = 1 << 20


def add_batches(app: FastAPI, settings: FrontendSettings) -> "asyncio.Task[None] | None":
    """Add the routes to the app, and start what runs batches; None where there are none.

    Raises ConfigError if the directory cannot be made.
    """
    if settings.batch_directory is None:
        return None
    try:
        store = BatchStore(Path(settings.batch_directory))
    except OSError as error:
        raise ConfigError(f"batch.directory {settings.batch_directory}: {error.strerror}") from error
    app.include_router(batch_router(store, int(settings.max_file_mb * _BYTES_PER_MB)))

    async def trusted(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, TRUSTED: True}, receive, send)

    # What fails within the app is its 500, as for any client.
    transport = httpx.ASGITransport(trusted, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://frontend")
    running = asyncio.create_task(BatchService(store, client, MAX_PRIORITY).run())
    running.add_done_callback(_log_end)
    return running


def _log_end(running: "asyncio.Task[None]") -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("batches are run no more", exc_info=error)
