"""The format of a batch's lines: what is taken, and what is said of the rest."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from batch_inputs import line, write_lines

from cluster.batch import files
from cluster.batch.files import identify, local_path, read_lines, written_whole
from cluster.batch.lines import BadLine, BatchLine, LineParser
from cluster.errors import ConfigError


def message_of(raw: bytes | dict[str, Any], parser: LineParser | None = None) -> str:
    found = (parser or LineParser()).parse(3, raw if isinstance(raw, bytes) else json.dumps(raw).encode())
    assert isinstance(found, BadLine)
    assert found.number == 3
    return found.message


def test_a_right_line() -> None:
    body = {"model": "m", "messages": []}
    found = LineParser().parse(1, json.dumps(line("a", url="/v1/chat/completions", body=body)).encode())
    assert found == BatchLine(1, "a", "/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"custom_id": NaN}', "not valid JSON"),
        (b"\xff", "not valid UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        ({"url": "/v1/completions"}, "custom_id is missing"),
        (line(""), "custom_id must be a string of 1 to 512 characters"),
        (line("a" * 513), "custom_id must be a string of 1 to 512 characters"),
        (line("a") | {"custom_id": 7}, "custom_id must be a string"),
        (line("a", method="GET"), "method must be POST"),
        (line("a", url="/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions"),
        (line("a", url=["/v1/completions"]), "url must be"),
        (line("a", body="b"), "body must be a JSON object"),
        (line("a", body={"stream": True}), "body.stream must be false"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(raw: bytes | dict[str, Any], message: str) -> None:
    assert message in message_of(raw)


def test_the_second_line_with_a_custom_id_is_wrong_even_if_the_first_was_too() -> None:
    parser = LineParser()
    parser.parse(1, json.dumps(line("a", url="/")).encode())
    assert message_of(line("a"), parser) == "custom_id is that of an earlier line"


def test_a_batch_may_have_one_endpoint_only() -> None:
    assert message_of(line("a"), LineParser(["/v1/chat/completions"])) == "url must be /v1/chat/completions"


def test_a_line_that_is_too_long_costs_no_memory_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr("cluster.batch.lines.MAX_LINE_BYTES", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a" * 1000 + b"\n\nb")
    found = list(read_lines(str(path), identify(str(path))))
    assert found == [(1, b"a" * 101), (2, b"\n"), (3, b"b")]
    assert identify(str(path)).num_lines == 3
    assert "longer than 100 bytes" in message_of(found[0][1])


@pytest.mark.parametrize("content", [b"", b"\n", b"a", b"a\n", b"a\nb", b"\n\n\n"])
def test_lines_are_counted_as_they_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    identity = identify(str(path))
    assert len(list(read_lines(str(path), identity))) == identity.num_lines
    assert identity.size == len(content)


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [line("a")])
    identity = identify(str(path))
    write_lines(path, [line("b")])
    with pytest.raises(ConfigError, match="was changed while it was read"):
        list(read_lines(str(path), identity))


def test_an_unreadable_input_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such/file"):
        identify("/no/such/file")
    with pytest.raises(ConfigError, match="nosuch://a"):
        identify("nosuch://a")


def test_files_elsewhere_are_read_and_written() -> None:
    with written_whole("memory://batches/out") as write:
        write(b"one\n")
        write(b"two\n")
    assert identify("memory://batches/out").num_lines == 2
    assert local_path("memory://batches/out") is None


@pytest.mark.parametrize("place", ["memory://batches/cut", "local"])
def test_a_file_that_is_not_written_to_its_end_does_not_appear(place: str, tmp_path: Path) -> None:
    path = str(tmp_path / "out") if place == "local" else place

    def write_half() -> None:
        with written_whole(path) as write:
            write(b"one\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert not files.exists(path)


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    assert local_path(f"file://{tmp_path}/a") == tmp_path / "a"
    with fsspec.open(f"file://{tmp_path}/a", "wb") as file:
        file.write(b"x")
    files.remove(f"file://{tmp_path}/a")
    files.remove(f"file://{tmp_path}/a")
    assert not files.exists(str(tmp_path / "a"))
