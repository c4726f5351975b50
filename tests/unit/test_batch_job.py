"""`chunkserve batch` from its options to its exit status, on a service in this process."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from batch_inputs import line, rows, write_lines

from cluster import commands
from cluster.batch.files import identify
from cluster.batch.journal import Journal


class _Echo(BaseHTTPRequestHandler):
    keys: ClassVar[set[str | None]] = set()

    def do_POST(self) -> None:
        self.keys.add(self.headers.get("authorization"))
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = json.dumps({"text": body["prompt"]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def batch(tmp_path: Path, *words: str, lines: int = 5) -> int:
    path = tmp_path / "in.jsonl"
    if not path.exists():
        write_lines(path, [line(f"l{number}") for number in range(lines)])
    return commands.run(["batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), *words])


def test_a_batch_and_the_same_again(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert batch(tmp_path, "--url", f"{url}/v1/") == 0
    assert [row["response"]["body"]["text"] for row in rows(tmp_path / "out.jsonl")] == [
        f"the prompt of l{number}" for number in range(5)
    ]
    before = (tmp_path / "out.jsonl").stat()
    assert batch(tmp_path, "--url", url) == 0
    assert (tmp_path / "out.jsonl").stat() == before
    assert "done before" in capsys.readouterr().out
    (tmp_path / "out.jsonl").unlink()
    assert batch(tmp_path, "--url", url) == 0
    assert len(rows(tmp_path / "out.jsonl")) == 5


def test_the_key_comes_from_a_file(tmp_path: Path, url: str) -> None:
    (tmp_path / "key").write_text("sesame\n")
    _Echo.keys.clear()
    assert batch(tmp_path, "--url", url, "--api-key-file", str(tmp_path / "key")) == 0
    assert _Echo.keys == {"Bearer sesame"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://x", "server.port=1"], "leave them out with --url"),
        (["--errors", "{folder}/out.jsonl"], "--output and --errors name the same file"),
        (["--journal", "{folder}/in.jsonl"], "--input and --journal name the same file"),
        (["--url", "http://x", "--api-key-file", "/no/key"], "--api-key-file /no/key"),
        (["--url", "nonsense"], "--url 'nonsense' must be http://host:port"),
        (["--url", "127.0.0.1:8000"], "must be http://host:port"),
        (["--url", "http://["], "must be http://host:port"),
        (["--url", "http://x:99999"], "must be http://host:port"),
        (["--url", "http://x/foo"], "must be http://host:port"),
        (["--url", "http://x", "--api-key-file", "{folder}/kéy"], "ASCII"),
        (["--errors", "{folder}/nowhere/e"], "--errors {folder}/nowhere/e is no place"),
        (["--errors", "{folder}"], "--errors {folder} is no place"),
        (["model.pth=x"], "unknown setting"),
    ],
)
def test_wrong_options_are_status_2(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kéy").write_text("kéy\n")
    assert batch(tmp_path, *(word.format(folder=tmp_path) for word in words)) == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err


def test_an_output_elsewhere_needs_a_journal_here(tmp_path: Path, url: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line("a")])
    words = ["batch", "--input", f"file://{source}", "--output", "memory://job/out.jsonl", "--url", url]
    assert commands.run(words) == 2
    assert commands.run([*words, "--journal", str(tmp_path / "j")]) == 0
    assert identify("memory://job/out.jsonl").num_lines == 1


def test_another_ones_output_is_not_written_over(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    for _ in range(2):
        assert batch(tmp_path, "--url", url) == 2
    assert "exists, and not by this batch" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_two_at_once_are_refused(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line("a")])
    held = Journal(tmp_path / "out.jsonl.journal", identify(str(source)))
    assert batch(tmp_path, "--url", url) == 2
    assert "another process works on this batch" in capsys.readouterr().err
    held.close()
    assert batch(tmp_path, "--url", url) == 0


def test_a_service_that_is_not_there_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert batch(tmp_path, "--url", "http://127.0.0.1:9", "--retry-seconds", "0.1") == 1
    assert "answered nothing for 0.1 s; last: ConnectError" in capsys.readouterr().err


def test_more_lines_in_flight_than_an_engine_admits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch(tmp_path, "--url", "http://x", "--concurrency", "99999999999")
    assert "at most 4096" in capsys.readouterr().err
