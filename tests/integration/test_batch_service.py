"""Batches over a real service: from the command line on a service of its own, and on one that runs."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from batch_inputs import line, rows, write_lines
from served_model import write_served_model
from service_process import ROOT, ServiceProcess

LINES = 300
_END_SECONDS = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("batches")
    words = [f"batch.directory={folder}", "scheduler.policy=priority", "model.name=m", "cache.memory_gb=0.1"]
    process = ServiceProcess(model, *words)
    try:
        process.wait_ready()
        yield process
        process.stop()
    finally:
        process.kill()


def batch_process(source: Path, output: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "cluster", "batch", "--input", str(source), "--output", str(output), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ended_by_a_signal_and_started_again(service: ServiceProcess, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(f"l{number}") for number in range(LINES)] + ["{"])
    output, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    first = batch_process(source, output, "--url", service.base_url)
    deadline = time.monotonic() + _END_SECONDS
    while not journal.exists() or journal.read_bytes().count(b"\n") < 10:
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=_END_SECONDS)
    assert first.returncode == 130, said
    assert "the same command goes on from here" in said
    assert not output.exists()
    second = batch_process(source, output, "--url", service.base_url)
    said, _ = second.communicate(timeout=_END_SECONDS)
    assert second.returncode == 0, said
    assert "going on: " in said
    assert [row["custom_id"] for row in rows(output)] == [f"l{number}" for number in range(LINES)]
    assert [row["error"]["line"] for row in rows(tmp_path / "out.jsonl.errors.jsonl")] == [LINES + 1]


def test_a_batch_of_the_service(service: ServiceProcess) -> None:
    with httpx.Client(base_url=service.base_url, timeout=30) as http:
        content = "".join(json.dumps(line(f"l{number}")) + "\n" for number in range(20))
        form = {"purpose": "batch"}
        file_id = http.post("/v1/files", data=form, files={"file": ("in.jsonl", content)}).json()["id"]
        wish = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=wish).json()
        deadline = time.monotonic() + _END_SECONDS
        while batch["status"] != "completed":
            assert time.monotonic() < deadline, batch
            time.sleep(0.1)
            batch = http.get(f"/v1/batches/{batch['id']}").json()
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        output = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        assert [json.loads(row)["custom_id"] for row in output] == [f"l{number}" for number in range(20)]


def test_on_a_service_of_its_own(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line("a"), line("b")])
    words = [f"model.path={model}", "model.name=m", "cache.memory_gb=0.1"]
    process = batch_process(source, tmp_path / "out.jsonl", *words)
    said, _ = process.communicate(timeout=2 * _END_SECONDS)
    assert process.returncode == 0, said
    assert len(rows(tmp_path / "out.jsonl")) == 2
    assert not list(tmp_path.glob("*.log"))
