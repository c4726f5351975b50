"""Faults, on processes that look like a service's."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.faults import FAULTS, main
from benchmarks.service_processes import ENGINE, WORKER, FaultError, ServiceProcesses

DEADLINE = 30.0
_ENGINE_CODE = """
import socket, sys, time
door = socket.create_server(("127.0.0.1", 0))
print(door.getsockname()[1], flush=True)
link = door.accept()[0]
door.close()
print("linked", flush=True)
print("end" if link.recv(1) == b"" else "data", flush=True)
time.sleep(600)
"""
_WORKER_CODE = """
import socket, sys, time
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def start(title: str, code: str, *args: str) -> "subprocess.Popen[str]":
    command = [title, "-c", code, *args]
    return subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, text=True)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


Pair = tuple["subprocess.Popen[str]", "subprocess.Popen[str]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """An engine and its rank, with the link between them."""
    engine = start(ENGINE, _ENGINE_CODE)
    assert engine.stdout is not None
    worker = start(WORKER, _WORKER_CODE, engine.stdout.readline().strip())
    assert engine.stdout.readline() == "linked\n"
    yield engine, worker
    for process in (engine, worker):
        process.kill()
        process.wait(DEADLINE)


def inflict(fault: str) -> str:
    return FAULTS[fault](ServiceProcesses(os.getpid()), random.Random(0))


def test_only_a_worker_with_a_link_is_a_rank(pair: Pair) -> None:
    spare = start(WORKER, "import time; time.sleep(600)")
    try:
        processes = ServiceProcesses(os.getpid())
        until(lambda: len(processes.named(WORKER)) == 2)
        assert [process.pid for process in processes.ranks()] == [pair[1].pid]
    finally:
        spare.kill()
        spare.wait(DEADLINE)


@pytest.mark.parametrize("words", [("-m", "cluster", "serve"), ("chunkserve", "serve", "server.port=1")], ids=" ".join)
def test_the_launcher_is_found_however_it_was_started(words: tuple[str, ...], tmp_path: Path) -> None:
    for script in (tmp_path / "cluster.py", tmp_path / "chunkserve"):
        script.write_text("import time; time.sleep(600)")
    other = subprocess.Popen([sys.executable, "chunkserve", "check-config"], cwd=tmp_path)
    launcher = subprocess.Popen([sys.executable, *words], cwd=tmp_path)
    try:
        until(lambda: len(psutil.Process(launcher.pid).cmdline()) == 1 + len(words))
        assert ServiceProcesses(os.getpid()).launcher().pid == launcher.pid
    finally:
        for process in (other, launcher):
            process.kill()
            process.wait(DEADLINE)


@pytest.mark.parametrize(("fault", "victim"), [("kill-worker", 1), ("kill-engine", 0)])
def test_killed(pair: Pair, fault: str, victim: int) -> None:
    assert str(pair[victim].pid) in inflict(fault)
    assert pair[victim].wait(DEADLINE) == -9
    assert pair[1 - victim].poll() is None


@pytest.mark.parametrize(("fault", "victim"), [("stop-worker", 1), ("stop-engine", 0)])
def test_stopped(pair: Pair, fault: str, victim: int) -> None:
    inflict(fault)
    until(lambda: psutil.Process(pair[victim].pid).status() == psutil.STATUS_STOPPED)
    assert psutil.Process(pair[1 - victim].pid).status() != psutil.STATUS_STOPPED


def test_paused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.ENGINE_PAUSE_SECONDS", 1.0)
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(inflict, "pause-engine")
        until(lambda: psutil.Process(pair[0].pid).status() == psutil.STATUS_STOPPED)
        assert pausing.result(DEADLINE) == f"engine {pair[0].pid} was stopped for 1 s"
    assert psutil.Process(pair[0].pid).status() != psutil.STATUS_STOPPED


def test_what_does_not_live_through_a_pause_is_said(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.faults.ENGINE_PAUSE_SECONDS", 1.0)
    with ThreadPoolExecutor() as pool:
        pausing = pool.submit(inflict, "pause-engine")
        until(lambda: psutil.Process(pair[0].pid).status() == psutil.STATUS_STOPPED)
        pair[0].kill()
        pair[0].wait(DEADLINE)
        with pytest.raises(FaultError, match="did not live through"):
            pausing.result(DEADLINE)


def test_cut_link(pair: Pair) -> None:
    try:
        assert inflict("cut-link") == "cut 1 links"
    except FaultError as error:
        pytest.skip(str(error))  # not every system lends sockets
    assert pair[0].stdout is not None
    assert pair[0].stdout.readline() == "end\n"
    assert pair[1].poll() is None


def test_garbage_reaches_every_port() -> None:
    code = (
        "import socket\ndoor = socket.create_server(('127.0.0.1', 0))\nprint('up', flush=True)\n"
        "print(len(door.accept()[0].recv(9999)) > 0, flush=True)"
    )
    doors = [start(title, code) for title in (ENGINE, ENGINE.replace("engine", "frontend"))]
    assert all(door.stdout is not None and door.stdout.readline() == "up\n" for door in doors)
    assert inflict("garbage") == "sent random bytes to 2 ports"
    assert [door.communicate(timeout=DEADLINE)[0] for door in doors] == ["True\n"] * 2


def test_what_cannot_be_done_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for fault in ("kill-worker", "kill-node", "cut-link"):
        assert main([fault, "--root", str(os.getpid())]) == 2
    assert "no process is called 'ray::WorkerActor'" in capsys.readouterr().err
    assert main(["stop-engine", "--root", "4194304"]) == 2
    assert "4194304 is gone" in capsys.readouterr().err
