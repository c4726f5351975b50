"""However the launcher ends, nothing of its run is left: no process, no port, and after a clean end no directory."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from served_model import write_served_model
from service_process import ServiceProcess, living_processes, wait_gone

from cluster.launch.launcher import check_port

CRASH_SECONDS = 20.0
CLUSTER_SECONDS = 40.0

Start = Callable[..., ServiceProcess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    started: list[ServiceProcess] = []

    def run(*words: str) -> ServiceProcess:
        started.append(ServiceProcess(model, *words))
        return started[-1]

    yield run
    for service in started:
        service.kill()


CLUSTER = """
import sys, ray
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster() -> Iterator[tuple[str, Path]]:
    """A Ray cluster of somebody else."""
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as folder:
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        owner = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        assert owner.stdout is not None
        yield owner.stdout.readline().strip(), Path(folder)
        owner.communicate(timeout=60)
        wait_gone(Path(folder), CRASH_SECONDS)


def assert_nothing_left(service: ServiceProcess, directory: Path) -> None:
    wait_gone(directory, CRASH_SECONDS)
    check_port("127.0.0.1", service.port)


def test_signals_to_the_whole_group_when_ready(start: Start) -> None:
    """Two services at once, for each waits most of the time. A signal to the launcher alone is the next test's."""
    services = {number: start("server.drain_seconds=2") for number in (signal.SIGINT, signal.SIGTERM)}
    directories = {}
    for number, service in services.items():
        service.wait_ready()
        directories[number] = service.run_directory
        assert len(living_processes(directories[number])) > 5  # the search sees what must go
    for number, service in services.items():
        service.signal_group(number)
    for number, service in services.items():
        assert service.wait() == 0, service.output
        service.wait_line("stopped")
        assert "Traceback" not in service.output
        assert_nothing_left(service, directories[number])
        assert not directories[number].exists()


DRAIN_SECONDS = 2
LONG, SHORT, REMAINDER = 4000, 200, 40
"""Output lengths, in tokens; the signal is sent when about `REMAINDER` tokens of a short one are still to come."""
WRITE_SECONDS = 10.0
"""What the ends of the last streams may take when their time is over; it is seconds less on an idle machine."""


async def test_sigterm_under_load_ends_every_stream_within_the_drain_time(start: Start) -> None:
    service = start(f"server.drain_seconds={DRAIN_SECONDS}", "model.name=tiny", "cache.memory_gb=0.25")
    service.wait_ready()
    directory = service.run_directory
    assert len(living_processes(directory)) > 5  # the search sees what must go
    all_begun, short_near_end = asyncio.Event(), asyncio.Event()
    num_begun, lengths = 0, [LONG, SHORT] * 6

    async def read(client: httpx.AsyncClient, max_tokens: int) -> tuple[str, float]:
        """Its end, and when that came."""
        nonlocal num_begun
        body = {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        events = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                events.append(line.removeprefix("data: "))
                if len(events) == 1:
                    num_begun += 1
                    if num_begun == len(lengths):
                        all_begun.set()
                if max_tokens == SHORT and len(events) >= SHORT - REMAINDER:
                    short_near_end.set()
        if events[-1] == "[DONE]":
            return json.loads(events[-2])["choices"][0]["finish_reason"], time.monotonic()
        return json.loads(events[-1])["error"]["type"], time.monotonic()

    async with httpx.AsyncClient(base_url=service.base_url, timeout=60, trust_env=False) as client:
        reading = [asyncio.ensure_future(read(client, max_tokens)) for max_tokens in lengths]
        for event in (all_begun, short_near_end):
            await asyncio.wait_for(event.wait(), 60)
        service.process.terminate()
        told_at = time.monotonic()
        ends = await asyncio.wait_for(asyncio.gather(*reading), 60)

    assert max(at for _, at in ends) - told_at < DRAIN_SECONDS + WRITE_SECONDS
    reasons = [reason for reason, _ in ends]
    assert set(reasons) == {"length", "server_error"}
    assert reasons.count("server_error") <= lengths.count(LONG)
    assert await asyncio.to_thread(service.wait) == 0, service.output
    told = re.search(r"drained: (\d+) open requests ended by themselves, (\d+) with an error", service.output)
    assert told is not None, service.output
    assert int(told[1]) <= reasons.count("length")
    assert int(told[2]) == reasons.count("server_error")
    assert "unread" not in service.output
    service.wait_line("stopped")
    assert "Traceback" not in service.output
    assert_nothing_left(service, directory)
    assert not directory.exists()


def test_sigterm_while_loading(start: Start) -> None:
    service = start()
    service.wait_line("starting Ray Serve")
    directory = service.run_directory
    assert service.stop(signal.SIGTERM) == 0, service.output
    assert_nothing_left(service, directory)


def test_sigterm_before_ray_has_started(start: Start) -> None:
    service = start()
    directory = service.run_directory
    assert service.stop(signal.SIGTERM) == 0, service.output
    assert_nothing_left(service, directory)


def test_a_killed_launcher_is_cleaned_up_after(start: Start) -> None:
    service = start()
    service.wait_ready()
    directory = service.run_directory
    service.process.kill()
    assert service.wait() == -signal.SIGKILL
    assert_nothing_left(service, directory)


def test_a_launcher_whose_ray_dies_says_so_and_ends(start: Start) -> None:
    service = start()
    service.wait_ready()
    directory = service.run_directory
    raylets = [child for child in psutil.Process(service.process.pid).children() if child.name() == "raylet"]
    os.kill(raylets[0].pid, signal.SIGKILL)
    assert service.wait() == 1, service.output
    service.wait_line("Ray's process .* has died")
    assert_nothing_left(service, directory)


def test_an_engine_that_cannot_start_ends_the_launcher_with_the_cause(start: Start) -> None:
    service = start("model.max_len=100000")
    directory = service.run_directory
    assert service.wait(120) == 1, service.output
    service.wait_line(r"^chunkserve: .*100000")
    assert_nothing_left(service, directory)


@pytest.mark.parametrize("killed", [False, True])
def test_a_running_cluster_is_used_and_left_as_it_was(
    start: Start, cluster: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    address, folder = cluster
    service = start("--address", address)
    service.wait_ready()
    service.wait_line("Python proxy")
    assert serve_processes(folder)
    if killed:
        service.process.kill()
        assert service.wait() == -signal.SIGKILL
    else:
        assert service.stop() == 0, service.output
    deadline = time.monotonic() + CLUSTER_SECONDS
    while left := serve_processes(folder):
        assert time.monotonic() < deadline, f"after {CLUSTER_SECONDS:g} s there still are {left}"
        time.sleep(0.2)
    check_port("127.0.0.1", service.port)
    assert any("raylet" in process for process in living_processes(folder))


def serve_processes(folder: Path) -> list[str]:
    ours = ("ray::Serve", "ray::Proxy", "ray::MetricsActor")
    return [process for process in living_processes(folder) if any(name in process for name in ours)]
