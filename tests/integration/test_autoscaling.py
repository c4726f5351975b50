"""A service whose engines come and go with the load: none while nobody asks, two while there is work for two."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator

import aiohttp
import httpx
import pytest
from api_fakes import VOCAB
from served_model import write_served_model
from service_process import ServiceProcess

from benchmarks.loadgen import new_session
from benchmarks.stream_load import Load, Stream

WAIT_SECONDS = 60.0


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    model = write_served_model(tmp_path_factory.mktemp("model"))
    started = ServiceProcess(
        model, "model.name=tiny", "model.dtype=float32", "cache.num_blocks=1000", "cache.enable_prefix_caching=false",
        "autoscaling.min_replicas=0", "autoscaling.max_replicas=2", "autoscaling.target_kv_usage=0.05",
        "autoscaling.up_seconds=1", "autoscaling.down_seconds=2", "autoscaling.wake_seconds=60",
        "server.drain_seconds=2",
    )  # fmt: skip
    try:
        started.wait_ready()
        yield started
    finally:
        started.kill()


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} not within {WAIT_SECONDS:g} s"
        time.sleep(0.2)


async def test_engines_go_when_nothing_is_open_and_come_with_requests(service: ServiceProcess) -> None:
    with httpx.Client(base_url=service.base_url, timeout=60, trust_env=False) as http:

        def health() -> str:
            answer = http.get("/health")
            return str(answer.json()["status"]) if answer.status_code == 200 else answer.text

        def is_live() -> bool:
            return http.get("/health/live").status_code == 200

        def num_engines() -> int:
            return len(re.findall(r"^chunkserve:engine_up\{[^}]*\} 1\.0$", http.get("/metrics").text, re.MULTILINE))

        assert health() == "ready"
        await asyncio.to_thread(wait_for, "none", lambda: health() == "scaled to zero")
        assert is_live()
        # Eight streams of up to 75 blocks each: more than the 50 that an engine of 1,000 should hold.
        load = Load(service.base_url, "tiny", num_streams=8, max_tokens=1000, vocab=VOCAB)
        streams: list[Stream] = []
        enough = asyncio.Event()

        async def keep_busy(session: aiohttp.ClientSession) -> None:
            while not enough.is_set():
                streams.extend(await load.run(session))

        async with new_session() as session:
            busy = asyncio.ensure_future(keep_busy(session))
            await asyncio.to_thread(wait_for, "waking", lambda: health() == "waking an engine")
            await asyncio.to_thread(wait_for, "one", lambda: num_engines() == 1)
            await asyncio.to_thread(wait_for, "two", lambda: num_engines() == 2)
            enough.set()
            await busy
        assert {(stream.error, stream.num_tokens) for stream in streams} == {(None, 1000)}
        service.wait_line("engine 1: load took")
    assert await asyncio.to_thread(service.stop) == 0, service.output
