"""However the launcher ends, nothing of its run is left: no process, no port, and after a clean end no directory."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from served_model import write_served_model
from service_process import ServiceProcess, living_processes, wait_gone

from cluster.launcher import check_port

CRASH_SECONDS = 20.0

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


def assert_nothing_left(service: ServiceProcess, directory: Path) -> None:
    wait_gone(directory, CRASH_SECONDS)
    check_port("127.0.0.1", service.port)


def test_ctrl_c_and_sigterm_when_ready(start: Start) -> None:
    for interrupt in (True, False):
        service = start()
        service.wait_ready()
        directory = service.run_directory
        assert len(living_processes(directory)) > 5  # the search sees what must go
        if interrupt:
            service.interrupt_group()
            assert service.wait() == 0, service.output
        else:
            assert service.stop(signal.SIGTERM) == 0, service.output
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
