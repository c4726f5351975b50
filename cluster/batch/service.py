"""The batches of a service, run one after the other by one of its front ends."""

import asyncio
import contextlib
import fcntl
import logging
import time
from typing import BinaryIO

import httpx

from cluster.batch.assemble import assemble
from cluster.batch.files import Identity, identify
from cluster.batch.journal import Counts, Journal
from cluster.batch.runner import BatchRun
from cluster.batch.sender import Sender
from cluster.batch.store import FINAL, RESULTS, BatchStore, Record
from cluster.errors import ChunkserveError

logger = logging.getLogger(__name__)

CONCURRENCY = 64
PATIENCE_SECONDS = 3600.0
LOOK_SECONDS = 0.5
"""Between two looks for new batches, for a wish to cancel, and for the place of a front end that has ended."""


class BatchService:
    """Each front end has one; the one that holds the lock of the directory runs batches, until its process ends."""

    def __init__(self, store: BatchStore, client: httpx.AsyncClient, priority: int) -> None:
        """`client` sends to the service itself."""
        self._store = store
        self._client = client
        self._priority = priority

    async def run(self) -> None:
        """Runs until it is cancelled."""
        with (self._store.directory / "lock").open("wb") as lock:
            leads = False
            while True:
                try:
                    leads = leads or _try_lock(lock)
                    if leads:
                        await self._run_waiting()
                except (ChunkserveError, OSError) as error:
                    logger.error("batches cannot be run now: %s", error)
                except Exception:  # Whatever is wrong with one batch, later ones need somebody who runs them.
                    logger.exception("batches cannot be run now")
                await asyncio.sleep(LOOK_SECONDS)

    async def _run_waiting(self) -> None:
        batches = await asyncio.to_thread(self._store.batches)
        for batch in reversed(batches):
            if batch["status"] not in FINAL:
                await self._run_one(batch)

    async def _run_one(self, batch: Record) -> None:
        """From whatever state it is in to a final one. Raises ConfigError, OSError if that cannot be written down."""
        try:
            path = str(await asyncio.to_thread(self._store.content, batch["input_file_id"]))
            identity = await asyncio.to_thread(identify, path)
            journal = await asyncio.to_thread(Journal, self._store.journal(batch["id"]), identity)
        except (ChunkserveError, KeyError) as error:
            logger.error("batch %s: %r", batch["id"], error)
            await self._end(batch, "failed", "the input file is no more there, or cannot be read")
            return
        if journal.finished is not None:
            journal.close()
            await asyncio.to_thread(self._describe_results, batch, journal.finished)
            await self._end(batch, "completed")
            return
        try:
            batch["status"] = "in_progress"
            batch.setdefault("in_progress_at", int(time.time()))
            batch["request_counts"]["total"] = identity.num_lines
            sender = Sender(self._client, self._priority, PATIENCE_SECONDS)
            run = BatchRun(path, identity, journal, sender, CONCURRENCY, lambda: None, [batch["endpoint"]])
            complete = await self._follow(asyncio.create_task(run.run()), batch, journal)
            await asyncio.to_thread(self._publish, batch, journal, identity)
        except (ChunkserveError, OSError) as error:
            logger.error("batch %s: %s", batch["id"], error)
            await self._end(batch, "failed", "the batch could not be brought to its end")
        except Exception:  # A fault of ours at this batch would come again: the next one shall have its turn.
            logger.exception("batch %s failed", batch["id"])
            await self._end(batch, "failed", "the batch could not be brought to its end")
        else:
            await self._end(batch, "completed" if complete else "cancelled")
        finally:
            journal.close()

    def _publish(self, batch: Record, journal: Journal, identity: Identity) -> None:
        output, errors = (self._store.result_path(batch["id"], kind) for kind in RESULTS)
        assemble(journal, identity, str(output), str(errors))
        self._describe_results(batch, journal.counts)

    def _describe_results(self, batch: Record, counts: Counts) -> None:
        """Of files that are in place."""
        _count(batch, counts)
        batch["output_file_id"] = self._store.publish(batch["id"], "output")
        if self._store.result_path(batch["id"], "errors").exists():
            batch["error_file_id"] = self._store.publish(batch["id"], "errors")

    async def _follow(self, running: "asyncio.Task[None]", batch: Record, journal: Journal) -> bool:
        """Write down how far it is, and cancel it when that is wished; whether it came to its end."""
        try:
            while not running.done():
                if self._store.is_cancelled(batch["id"]):
                    running.cancel()
                _count(batch, journal.counts)
                await asyncio.to_thread(self._store.put_batch, batch)
                await asyncio.wait([running], timeout=LOOK_SECONDS)
            if running.cancelled():
                return False
            running.result()
            return True
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def _end(self, batch: Record, status: str, message: str | None = None) -> None:
        batch["status"] = status
        batch[f"{status}_at"] = int(time.time())
        if message is not None:
            error = {"code": "batch_failed", "message": message, "param": None, "line": None}
            batch["errors"] = {"object": "list", "data": [error]}
        await asyncio.to_thread(self._store.put_batch, batch)
        self._store.journal(batch["id"]).unlink(missing_ok=True)


def _count(batch: Record, counts: Counts) -> None:
    batch["request_counts"] |= {"completed": counts.answers, "failed": counts.errors}


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
