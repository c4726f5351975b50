"""A batch from its input to its journal: many lines in flight, few in memory."""

import asyncio
from collections.abc import Callable, Collection
from itertools import islice

from cluster.batch.files import Identity, read_lines
from cluster.batch.journal import Journal
from cluster.batch.lines import ENDPOINTS, BadLine, BatchLine, LineParser
from cluster.batch.rows import answer_row, bad_line_row, refusal_row
from cluster.batch.sender import Sender

READ_AHEAD = 64
"""Lines that are read at a time, in a thread: an input may be far away."""
SYNC_SECONDS = 1.0
"""What a loss of power may cost."""


class BatchRun:
    """One run over an input. What its journal has is skipped."""

    def __init__(
        self,
        path: str,
        identity: Identity,
        journal: Journal,
        sender: Sender,
        concurrency: int,
        on_line: Callable[[], object],
        endpoints: Collection[str] = ENDPOINTS,
    ) -> None:
        """`on_line` is called once for each line of the input, when it is done or known to be."""
        self._path = path
        self._identity = identity
        self._journal = journal
        self._sender = sender
        self._concurrency = concurrency
        self._on_line = on_line
        self._endpoints = endpoints
        self._name = identity.sha256[:12]

    async def run(self) -> None:
        """Return when every line has its record. Raises ConfigError for the input, EngineError for the service,
        OSError for the journal; what was finished until then is in the journal, also after a cancellation.
        """
        queue: asyncio.Queue[BatchLine | None] = asyncio.Queue(self._concurrency)
        syncing = asyncio.create_task(self._sync_often())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(queue))
                for _ in range(self._concurrency):
                    group.create_task(self._answer(queue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            syncing.cancel()
            self._journal.sync()

    async def _read(self, queue: asyncio.Queue[BatchLine | None]) -> None:
        parser = LineParser(self._endpoints)
        lines = read_lines(self._path, self._identity)
        while some := await asyncio.to_thread(lambda: list(islice(lines, READ_AHEAD))):
            for number, raw in some:
                # Lines that are done are parsed as well: later ones must not have their custom_id.
                line = parser.parse(number, raw) if raw.strip() else None
                if line is None or number in self._journal:
                    self._on_line()
                elif isinstance(line, BadLine):
                    self._journal.append(number, "E", bad_line_row(self._name, line))
                    self._on_line()
                else:
                    await queue.put(line)
        for _ in range(self._concurrency):
            await queue.put(None)

    async def _answer(self, queue: asyncio.Queue[BatchLine | None]) -> None:
        while (line := await queue.get()) is not None:
            answer = await self._sender.send(line)
            if answer.status == 200:
                self._journal.append(line.number, "A", answer_row(self._name, line, answer))
            else:
                self._journal.append(line.number, "E", refusal_row(self._name, line, answer))
            self._on_line()

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self._journal.sync)
