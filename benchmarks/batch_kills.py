"""A batch that is killed at random moments and started again: is every line answered exactly once?

python -m benchmarks batch_kills                 # 2,000 lines, 20 of them malformed, three kills, a tiny model
python -m benchmarks batch_kills --own-service   # each start of the batch also starts its own service

Exit code 1 when a row is missing, doubled, out of order, or not the answer to its line.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.random_model import write_served_model
from benchmarks.service import running_service
from benchmarks.summary import table

_ROOT = Path(__file__).resolve().parent.parent
_MODEL = "tiny"
_RUN_SECONDS = 900.0
_LOOK_SECONDS = 0.01


def _right(number: int) -> dict[str, Any]:
    """The answer repeats its prompt, so that it can be told whose it is."""
    body = {
        "model": _MODEL,
        "prompt": f"line {number}:",
        "max_tokens": 8,
        "temperature": 0,
        "echo": True,
        "ignore_eos": True,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def _malformed(number: int, kind: int) -> str:
    """A line that is no request, or one that the service must refuse; `number` counts lines from 1."""
    right = _right(number)
    wrong: tuple[str | dict[str, Any], ...] = (
        json.dumps(right)[:-9],
        {key: value for key, value in right.items() if key != "custom_id"},
        right | {"custom_id": "line-1"},
        right | {"url": "/v1/embeddings"},
        right | {"method": "GET"},
        right | {"body": right["body"] | {"stream": True}},
        right | {"body": right["body"] | {"temperature": 9}},
        right | {"body": right["body"] | {"model": "no-such-model"}},
    )
    line = wrong[kind % len(wrong)]
    return line if isinstance(line, str) else json.dumps(line)


def write_input(path: Path, lines: int, malformed: int, rng: random.Random) -> set[int]:
    """The numbers of the malformed lines, which are anywhere but in the first."""
    bad = rng.sample(range(2, lines + 1), malformed)
    kinds = {number: kind for kind, number in enumerate(bad)}
    path.write_text(
        "".join(
            (_malformed(number, kinds[number]) if number in kinds else json.dumps(_right(number))) + "\n"
            for number in range(1, lines + 1)
        )
    )
    return set(bad)


def check(output: Path, errors: Path, lines: int, bad: set[int]) -> list[str]:
    """What is wrong with the two files, in words."""
    problems = []
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    expected = [f"line-{number}" for number in range(1, lines + 1) if number not in bad]
    ids = [row["custom_id"] for row in answers]
    if ids != expected:
        missing, doubled = len(set(expected) - set(ids)), len(ids) - len(set(ids))
        problems.append(f"{len(ids)} answers for {len(expected)} lines: {missing} missing, {doubled} doubled")
    strangers = sum(
        not row["response"]["body"]["choices"][0]["text"].startswith(row["custom_id"].replace("-", " ") + ":")
        for row in answers
    )
    if strangers:
        problems.append(f"{strangers} answers to another line's prompt")
    refused = [json.loads(line) for line in errors.read_text().splitlines()]
    if [row["error"]["line"] for row in refused] != sorted(bad):
        problems.append(f"{len(refused)} error rows for {len(bad)} malformed lines, or of other lines")
    if not all(row["error"]["message"] for row in refused):
        problems.append("error rows without a reason")
    return problems


class Attempts:
    """Starts of the same command, each killed when the journal has so many records, the last one not."""

    def __init__(self, command: Sequence[str], journal: Path, rng: random.Random) -> None:
        self._command, self._journal, self._rng = command, journal, rng
        self.rows: list[list[object]] = []

    def run(self, kill_at: int | None) -> None:
        """Raises SystemExit when the batch ends otherwise than it should."""
        before, began = self._records(), time.monotonic()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(self._command, cwd=_ROOT, stdout=log, stderr=log)
            try:
                while process.poll() is None and not (kill_at is not None and self._records() >= kill_at):
                    if time.monotonic() - began > _RUN_SECONDS:
                        raise SystemExit(f"the batch did not end within {_RUN_SECONDS:g} s")
                    time.sleep(_LOOK_SECONDS)
                if kill_at is not None:
                    time.sleep(self._rng.uniform(0.0, 0.05))
            finally:
                process.kill()
                status = process.wait()
            if status != (0 if kill_at is None else -9):
                log.seek(0)
                raise SystemExit(f"the batch ended with {status}:\n{log.read().decode(errors='replace')[-4000:]}")
        after = "output" if kill_at is None else self._records()
        how = "to its end" if kill_at is None else "kill -9"
        self.rows.append([f"start {len(self.rows) + 1}", before, after, f"{time.monotonic() - began:.1f}", how])

    def _records(self) -> int:
        """Lines of the input that have a record."""
        return max(0, self._journal.read_bytes().count(b"\n") - 1) if self._journal.exists() else 0


@contextmanager
def _where(own_service: bool, settings: Sequence[str]) -> Iterator[list[str]]:
    """The words that tell the batch where its service is."""
    if own_service:
        yield list(settings)
        return
    with running_service([*settings, "scheduler.policy=priority"]) as base_url:
        yield ["--url", base_url]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when a row is not as it must be."""
    parser = argparse.ArgumentParser(
        prog="batch_kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--malformed", type=int, default=20)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own-service", action="store_true", help="let the batch start its service, at every start")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="chunkserve-batch-") as folder:
        model, source, output = (Path(folder, name) for name in ("model", "in.jsonl", "out.jsonl"))
        write_served_model(model)
        bad = write_input(source, args.lines, args.malformed, rng)
        settings = [f"model.path={model}", f"model.name={_MODEL}", "cache.memory_gb=0.1"]
        with _where(args.own_service, settings) as words:
            command = [sys.executable, "-m", "cluster", "batch", "--input", str(source), "--output", str(output)]
            attempts = Attempts([*command, *words], Path(f"{output}.journal"), rng)
            for kill_at in sorted(rng.sample(range(args.lines), args.kills)):
                attempts.run(kill_at)
            attempts.run(None)
        print(table(["", "lines done before", "after", "s", "ended by"], attempts.rows))
        problems = check(output, Path(f"{output}.errors.jsonl"), args.lines, bad)
    for problem in problems:
        print(f"WRONG: {problem}")
    if not problems:
        print(f"{args.lines - len(bad)} answers, each once and in order; {len(bad)} error rows with line and reason")
    return 1 if problems else 0
