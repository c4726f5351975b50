"""Batch files for tests, and a service that answers them in this process."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from cluster.batch.files import identify
from cluster.batch.journal import Journal
from cluster.batch.runner import BatchRun
from cluster.batch.sender import Sender


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    """A line that is right, but for the changes."""
    body = {"model": "m", "prompt": f"the prompt of {custom_id}", "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | changes


def write_lines(path: Path, lines: list[Any]) -> Path:
    """Each line as JSON, or as it is if it is text."""
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


class FakeService:
    """Answers with the prompt. `faults` are answers or errors that come first, the next one for each request."""

    def __init__(self, *faults: httpx.Response | Exception) -> None:
        self.faults = list(faults)
        self.prompts: Counter[str] = Counter()
        self.priorities: set[int] = set()
        self.max_answers = 10**9

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer), base_url="http://service")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault
        if sum(self.prompts.values()) == self.max_answers:
            raise KeyboardInterrupt
        body = json.loads(request.content)
        self.priorities.add(body["priority"])
        if body.get("max_tokens", 1) < 0:
            return error(400, "max_tokens must be a whole number from 0 to 9")
        self.prompts[body["prompt"]] += 1
        return httpx.Response(200, json={"text": body["prompt"]}, headers={"x-request-id": "r"})


def error(status: int, message: str, headers: dict[str, str] | None = None) -> httpx.Response:
    body = {"error": {"message": message, "type": "t", "param": None, "code": None}}
    return httpx.Response(status, json=body, headers=headers)


async def run_batch(
    path: Path, journal: Journal, service: FakeService, on_line: Callable[[], object] = lambda: None
) -> None:
    async with service.client() as client:
        await BatchRun(str(path), identify(str(path)), journal, Sender(client, 7, 0.2), 3, on_line).run()
