"""A batch against a service in this process: every line once, whatever fails on the way."""

import asyncio
from pathlib import Path

import httpx
import pytest
from batch_inputs import FakeService, error, line, rows, run_batch, write_lines

from cluster.batch import sender
from cluster.batch.assemble import assemble
from cluster.batch.files import identify
from cluster.batch.journal import Counts, Journal
from cluster.errors import EngineError


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(sender, "LONGEST_PAUSE_SECONDS", 0.01)


class Batch:
    """An input and its files in a directory."""

    def __init__(self, folder: Path, lines: list) -> None:
        self.input = write_lines(folder / "in.jsonl", lines)
        self.output = folder / "out.jsonl"
        self.errors = folder / "errors.jsonl"
        self.journal = folder / "journal"
        self.progress = 0

    async def run(self, service: FakeService) -> Counts:
        journal = Journal(self.journal, identify(str(self.input)))
        try:
            await run_batch(self.input, journal, service, self._count)
            assemble(journal, identify(str(self.input)), str(self.output), str(self.errors))
            return journal.counts
        finally:
            journal.close()

    def _count(self) -> None:
        self.progress += 1


async def test_every_line_has_its_row_in_order(tmp_path: Path) -> None:
    lines = [line("a"), "", line("b", url="/"), "{", line("c"), line("a"), line("d", body={"max_tokens": -1})]
    batch, service = Batch(tmp_path, lines), FakeService()
    assert await batch.run(service) == Counts(2, 4)
    name = identify(str(batch.input)).sha256[:12]
    assert rows(batch.output) == [
        {
            "id": f"batch_req_{name}_{number}",
            "custom_id": custom_id,
            "response": {"status_code": 200, "request_id": "r", "body": {"text": f"the prompt of {custom_id}"}},
            "error": None,
        }
        for number, custom_id in ((1, "a"), (5, "c"))
    ]
    refused = rows(batch.errors)
    assert [(row["error"]["line"], row["custom_id"]) for row in refused] == [(3, "b"), (4, None), (6, "a"), (7, "d")]
    assert refused[0]["response"] is None
    assert refused[3]["error"]["message"] == "max_tokens must be a whole number from 0 to 9"
    assert refused[3]["response"]["status_code"] == 400
    assert batch.progress == 7
    assert service.priorities == {7}


async def test_without_errors_there_is_no_error_file(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("a")])
    batch.errors.write_text("of an earlier run")
    await batch.run(FakeService())
    assert not batch.errors.exists()


@pytest.mark.parametrize("answers", [1, 7, 19])
async def test_what_was_answered_is_not_asked_again(tmp_path: Path, answers: int) -> None:
    batch, service = Batch(tmp_path, [line(f"l{number}") for number in range(20)]), FakeService()
    journal = Journal(batch.journal, identify(str(batch.input)))
    left = iter(range(answers - 1))
    # Called when a line is done, it ends the run at that of the given number.
    running = asyncio.create_task(
        run_batch(batch.input, journal, service, lambda: next(left, None) is None and running.cancel())
    )
    await asyncio.wait([running])
    assert running.cancelled()
    done = journal.counts.answers
    journal.close()
    asked = sum(service.prompts.values())
    assert await batch.run(service) == Counts(20, 0)
    assert sum(service.prompts.values()) == asked + 20 - done
    assert [row["custom_id"] for row in rows(batch.output)] == [f"l{number}" for number in range(20)]


@pytest.mark.parametrize(
    "fault",
    [
        error(429, "later", {"retry-after": "0"}),
        error(503, "starting", {"retry-after": "soon"}),
        error(500, "internal error"),
        error(408, "slow"),
        httpx.Response(500, text="a proxy's words"),
        httpx.Response(404, text="Path '/v1/completions' not found."),
        httpx.Response(200, text='{"cut'),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("gone"),
    ],
)
async def test_what_may_pass_is_tried_again(tmp_path: Path, fault: httpx.Response | Exception) -> None:
    assert await Batch(tmp_path, [line("a"), line("b")]).run(FakeService(fault)) == Counts(2, 0)


@pytest.mark.parametrize(
    "fault",
    [
        error(404, "no such model"),
        error(413, "too large"),
        error(500, "the engine gave it up", {"x-should-retry": "false"}),
    ],
)
async def test_what_will_not_pass_is_an_error_at_once(tmp_path: Path, fault: httpx.Response) -> None:
    assert await Batch(tmp_path, [line("a"), line("b")]).run(FakeService(fault)) == Counts(1, 1)


async def test_retry_after_is_obeyed(tmp_path: Path) -> None:
    began = asyncio.get_running_loop().time()
    await Batch(tmp_path, [line("a")]).run(FakeService(error(429, "later", {"retry-after": "1"})))
    assert asyncio.get_running_loop().time() - began >= 1


async def test_a_wrong_key_ends_the_batch(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("a")])
    with pytest.raises(EngineError, match="refuses the API key"):
        await batch.run(FakeService(error(401, "the API key is missing or wrong")))
    assert await batch.run(FakeService()) == Counts(1, 0)


async def test_a_service_that_is_gone_ends_the_batch_which_then_goes_on(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("a"), line("b")])
    with pytest.raises(EngineError, match=r"answered nothing for 0\.2 s; last: ConnectError refused"):
        await batch.run(FakeService(*[httpx.ConnectError("refused")] * 1000))
    assert not batch.output.exists()
    assert await batch.run(FakeService()) == Counts(2, 0)


class PickyService(FakeService):
    """Fails one prompt for ever, and is slow enough with the others to be answering all the time."""

    def __init__(self, fault: httpx.Response, times: int) -> None:
        super().__init__()
        self.fault = fault
        self.times = times

    def client(self) -> httpx.AsyncClient:
        async def answer(request: httpx.Request) -> httpx.Response:
            if b"of bad" in request.content and self.times:
                self.times -= 1
                return self.fault
            await asyncio.sleep(0.02)
            return self._answer(request)

        return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://service")


async def test_a_line_at_which_the_service_fails_fails_alone(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("bad"), *(line(f"l{number}") for number in range(60))])
    assert await batch.run(PickyService(error(503, "unable"), 10**9)) == Counts(60, 1)
    assert "given up after 0.2 s: status 503" in rows(batch.errors)[0]["error"]["message"]


async def test_a_line_that_is_one_too_many_waits_as_long_as_others_are_answered(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("bad"), *(line(f"l{number}") for number in range(60))])
    service = PickyService(error(429, "full"), 30)
    assert await batch.run(service) == Counts(61, 0)
    assert service.times == 0


async def test_a_line_that_the_service_cannot_compute_is_not_sent_for_ever(tmp_path: Path) -> None:
    batch = Batch(tmp_path, [line("bad"), *(line(f"l{number}") for number in range(3))])
    service = PickyService(error(500, "internal error"), 10**9)
    assert await batch.run(service) == Counts(3, 1)
    assert 10**9 - service.times == sender.MOST_FAULTS
    assert rows(batch.errors)[0]["response"]["status_code"] == 500


async def test_what_cannot_be_sent_is_an_error_of_its_line(tmp_path: Path) -> None:
    body = '{"model": "m", "prompt": "a\\ud800"}'
    lines = [f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}', line("b")]
    lines.append(lines[0].replace('"a"', '"c"', 1).replace('"a\\ud800"', "1e999"))
    batch = Batch(tmp_path, lines)
    assert await batch.run(FakeService()) == Counts(1, 2)
    messages = [row["error"]["message"] for row in rows(batch.errors)]
    assert messages == ["body holds a text that is not Unicode", "body holds a number that is not finite"]
