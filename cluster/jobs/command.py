"""`chunkserve batch`: one batch, from its input file to its output file; killed anywhere, the same command goes on."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from tqdm import tqdm

from cluster.batch.assemble import assemble
from cluster.batch.files import Identity, identify
from cluster.batch.journal import Journal
from cluster.batch.runner import BatchRun
from cluster.batch.sender import Sender
from cluster.errors import EngineError
from cluster.frontend.protocol import MAX_PRIORITY
from cluster.jobs.options import JobPaths
from cluster.jobs.own_service import own_service
from cluster.launch.signals import FORCED_EXIT, Stopped, StopSignals

Say = Callable[[str], None]

_LOOK_SECONDS = 0.2
_LOG_SECONDS = 10.0
"""Between two looks at the progress where nobody watches: in a job's log."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What to do. Without a `url`, a service is started with `service_words`, on the Ray at `address` if given."""

    paths: JobPaths
    concurrency: int
    patience_seconds: float
    api_key: str | None = None
    url: str | None = None
    address: str | None = None
    service_words: Sequence[str] = ()


def run_job(job: BatchJob, say: Say) -> int:
    """Run it; the exit status: 0 when every line has its row, 130 when a signal came first.

    Raises ConfigError for a wrong file, EngineError when the service cannot answer; the same command then goes on.
    """
    stop = StopSignals()
    stop.install()
    try:
        identity = identify(job.paths.input)
        journal = Journal(job.paths.journal, identity)
        try:
            return _run(job, identity, journal, stop, say)
        finally:
            journal.close()
    except Stopped:
        say("stopped; the same command goes on from here")
        return FORCED_EXIT
    except OSError as error:
        raise EngineError(f"{error.filename or job.paths.journal}: {error.strerror}") from error


def _run(job: BatchJob, identity: Identity, journal: Journal, stop: StopSignals, say: Say) -> int:
    paths = job.paths
    if journal.finished is not None:
        if paths.output_exists():
            say(f"done before: {paths.output}")
            return 0
        journal.restart()
    began = time.monotonic()
    before = journal.counts.answers + journal.counts.errors
    if before:
        say(f"going on: {before} lines are done")
    with _service(job, say) as base_url:
        _answer_all(job, base_url, identity, journal, stop)
    assemble(journal, identity, paths.output, paths.errors)
    counts = journal.counts
    say(f"{counts.answers} answers in {paths.output} after {time.monotonic() - began:.1f} s")
    if counts.errors:
        say(f"{counts.errors} errors in {paths.errors}")
    paths.service_log.unlink(missing_ok=True)
    return 0


@contextmanager
def _service(job: BatchJob, say: Say) -> Iterator[str]:
    if job.url is not None:
        yield job.url
        return
    say(f"starting a service; its log is {job.paths.service_log}")
    with own_service(job.service_words, job.address, job.paths.service_log) as base_url:
        yield base_url


def _answer_all(job: BatchJob, base_url: str, identity: Identity, journal: Journal, stop: StopSignals) -> None:
    """Raises Stopped at a signal, when what was written is on the disk."""
    stop.install(force=lambda: None)
    try:
        asyncio.run(_until_stopped(job, base_url, identity, journal, stop))
    finally:
        stop.install()
    if stop:
        raise Stopped


async def _until_stopped(job: BatchJob, base_url: str, identity: Identity, journal: Journal, stop: StopSignals) -> None:
    headers = {} if job.api_key is None else {"authorization": f"Bearer {job.api_key}"}
    limits = httpx.Limits(max_connections=job.concurrency, max_keepalive_connections=job.concurrency)
    watched = sys.stderr.isatty()
    with tqdm(total=identity.num_lines, unit=" lines", mininterval=0.1 if watched else _LOG_SECONDS) as progress:
        async with httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, trust_env=False) as client:
            sender = Sender(client, MAX_PRIORITY, job.patience_seconds)
            run = BatchRun(job.paths.input, identity, journal, sender, job.concurrency, progress.update)
            running = asyncio.create_task(run.run())
            while not (await asyncio.wait([running], timeout=_LOOK_SECONDS))[0]:
                if stop:
                    running.cancel()
            if not running.cancelled():
                running.result()
