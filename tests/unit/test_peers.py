"""The peers' environments, commands and processes."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.options import processor_dtype
from benchmarks.peers import environment as environment_module
from benchmarks.peers import scheduler_process
from benchmarks.peers.environment import PeerEnvironment, PeerError
from benchmarks.peers.running import PEERS
from benchmarks.peers.scheduler_process import running_vllm_scheduler
from benchmarks.peers.vllm import Vllm, wanted_requirements
from benchmarks.service import ServiceError, free_port, running_server

# Environments


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would make environments; a `venv` makes the directory only."""
    commands: list[list[str]] = []

    def run(command: Sequence[str]) -> str:
        commands.append(list(command))
        if "venv" in command:
            Path(command[-1]).mkdir()
        return ""

    monkeypatch.setattr(environment_module, "_run", run)
    return commands


def test_an_environment_is_made_once(made: list[list[str]], tmp_path: Path) -> None:
    environment = PeerEnvironment("peer-1.0", tmp_path / "cache")
    for _ in range(2):
        environment.ensure(lambda env: env.pip_install("peer==1.0"))
    assert [command[1:3] for command in made] == [["-m", "venv"], ["-m", "pip"]]
    assert made[1][0] == str(environment.python)
    assert made[1][-1] == "peer==1.0"


def test_one_that_was_not_finished_is_made_anew(made: list[list[str]], tmp_path: Path) -> None:
    def fail(environment: PeerEnvironment) -> None:
        (environment.directory / "half").touch()
        raise PeerError("no network")

    environment = PeerEnvironment("peer-1.0", tmp_path)
    with pytest.raises(PeerError, match="no network"):
        environment.ensure(fail)
    environment.ensure(lambda env: None)
    assert environment.is_complete
    assert not (environment.directory / "half").exists()


def test_a_step_that_fails_says_what_it_wrote(tmp_path: Path) -> None:
    environment = PeerEnvironment("peer-1.0", tmp_path)
    environment.python.parent.mkdir(parents=True)
    with pytest.raises(PeerError, match=r"bin/python"):
        environment.output_of("1")
    environment.python.symlink_to(sys.executable)
    assert environment.output_of("print(6 * 7)") == "42\n"
    with pytest.raises(PeerError, match="code 3\nits last words"):
        environment.output_of("print('its last words'); raise SystemExit(3)")


def test_requirements_of_extras_and_media_are_not_wanted() -> None:
    lines = [
        "numpy",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision; platform_machine != 'riscv64'",
        "torchaudio",
        "torchcodec>=0.14",
        "torch-geometric>=1",
        "mistral_common[image]>=1.11.6",
        'zentorch==2.13.0.1; extra == "zen"',
    ]
    assert wanted_requirements(lines) == [
        "numpy",
        "torch==2.13.0; platform_machine == 'x86_64'",
        "torch-geometric>=1",
        "mistral_common[image]>=1.11.6",
    ]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_starts_with_the_model_the_port_and_the_budget(name: str, tmp_path: Path) -> None:
    peer = PEERS[name](tmp_path)
    command = peer.command(Path("/models/tiny"), 384, 1234)
    assert Path(command[0]).parent == peer.environment.directory / "bin"
    assert command[1:3] == ["serve", "/models/tiny"]
    assert {"384", "1234", processor_dtype(), "127.0.0.1"} < set(command)
    assert peer.name == name


def test_the_peer_may_use_the_cores_that_we_may_use() -> None:
    cores = {int(core) for core in Vllm().variables()["VLLM_CPU_OMP_THREADS_BIND"].split(",")}
    assert cores == os.sched_getaffinity(0)


# Servers

SERVER = """
import http.server, subprocess, sys
left_behind = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(left_behind.pid).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_server_leaves_no_process_behind() -> None:
    port = free_port()
    with running_server([sys.executable, "-c", SERVER, str(port)], f"http://127.0.0.1:{port}") as url:
        code = f"import urllib.request as r; print(r.urlopen('{url}/health').read().decode())"
        pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout)
        assert is_running(pid)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_does_not_come_up_is_named_with_its_last_words() -> None:
    with (
        pytest.raises(ServiceError, match="the peer ended with code 3 while starting\nno model"),
        running_server(
            [sys.executable, "-c", "print('no model'); raise SystemExit(3)"], "http://127.0.0.1:9", "the peer"
        ),
    ):
        pass
    sleeper = "import time; print('thinking', flush=True); time.sleep(600)"
    with (
        pytest.raises(ServiceError, match=r"the peer was not healthy within 1 s\nthinking"),
        running_server([sys.executable, "-c", sleeper], "http://127.0.0.1:9", "the peer", start_seconds=1.0),
    ):
        pass


# vLLM's scheduler

ANSWERS = """
import json, sys
print("INFO loading")
for line in sys.stdin:
    asked = json.loads(line)
    if asked["num_decodes"] == 13:
        sys.exit("unlucky")
    answer = {"schedule_ms": asked["num_decodes"], "update_ms": asked["num_steps"], "total_ms": 5.0}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def scripted_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.setattr(scheduler_process, "_SCRIPT", tmp_path / "answers.py")
    monkeypatch.setattr(Vllm, "prepare", lambda self: None)
    monkeypatch.setattr(environment_module, "default_cache_dir", lambda: tmp_path)
    python = Vllm().environment.python
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)


@pytest.mark.usefixtures("scripted_scheduler")
def test_the_scheduler_process_answers_one_measurement_at_a_time(tmp_path: Path) -> None:
    with running_vllm_scheduler(tmp_path) as scheduler:
        assert scheduler.measure(16, 100, 64) == (16, 100, 5.0)
        assert scheduler.measure(64, 200, 64) == (64, 200, 5.0)
        with pytest.raises(PeerError, match="unlucky"):
            scheduler.measure(13, 100, 64)
        with pytest.raises(PeerError, match="unlucky"):
            scheduler.measure(16, 100, 64)
