"""Uploaded files and batches of a service, on disk: what there is after a restart is what there was before.

    DIRECTORY/files/ID/content, DIRECTORY/files/ID/file.json     a file and what is known of it
    DIRECTORY/batches/ID.json, ID.cancel, ID.journal             a batch, the wish to cancel it, its journal

Any front end may add a file or a batch; only the one that runs batches writes a batch again. Each JSON file is replaced
as a whole.
"""

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

from cluster.batch.files import written_whole

Record = dict[str, Any]
"""A file or a batch as the API shows it."""
FINAL = frozenset({"completed", "failed", "cancelled"})
Result = Literal["output", "errors"]
RESULTS: tuple[Result, ...] = ("output", "errors")
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}[oe]?")


class BatchStore:
    """Blocks on the disk: call it in a thread. Raises ConfigError where the disk refuses, KeyError for unknown ids."""

    def __init__(self, directory: Path) -> None:
        """Makes the directories. Raises OSError."""
        self.directory = directory
        self._files = directory / "files"
        self._batches = directory / "batches"
        self._files.mkdir(parents=True, exist_ok=True)
        self._batches.mkdir(exist_ok=True)

    def add_file(self, name: str, content: IO[bytes]) -> Record:
        """Store an uploaded file."""
        file_id = f"file-{secrets.token_hex(12)}"

        def copy(write: Callable[[bytes], Any]) -> None:
            while chunk := content.read(1 << 20):
                write(chunk)

        return self._put_file(file_id, name, "batch", copy)

    def result_path(self, batch_id: str, kind: Result) -> Path:
        """Where the output or the errors of a batch are to be written; `publish` then makes it a file."""
        folder = self._files / _result_id(batch_id, kind)
        folder.mkdir(exist_ok=True)
        return folder / "content"

    def publish(self, batch_id: str, kind: Result) -> str:
        """A result's content is complete; its id."""
        file_id = _result_id(batch_id, kind)
        self._describe(file_id, f"{batch_id}_{kind}.jsonl", "batch_output")
        return file_id

    def file(self, file_id: str) -> Record:
        return _read(self._folder(file_id) / "file.json", file_id)

    def content(self, file_id: str) -> Path:
        self.file(file_id)
        return self._folder(file_id) / "content"

    def files(self) -> list[Record]:
        """The newest first."""
        return _sorted(path / "file.json" for path in self._files.iterdir())

    def is_read(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads it."""
        return any(batch["input_file_id"] == file_id and batch["status"] not in FINAL for batch in self.batches())

    def delete_file(self, file_id: str) -> None:
        folder = self._folder(file_id)
        if not (folder / "file.json").exists():
            raise KeyError(file_id)
        (folder / "file.json").unlink()
        shutil.rmtree(folder)

    def add_batch(self, input_file_id: str, endpoint: str, metadata: dict[str, str] | None) -> Record:
        """A new batch, to be run by whoever runs batches."""
        batch: Record = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": input_file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self.put_batch(batch)
        return batch

    def put_batch(self, batch: Record) -> None:
        _write(self._batches / f"{batch['id']}.json", batch)

    def batch(self, batch_id: str) -> Record:
        _check_id(batch_id)
        batch = _read(self._batches / f"{batch_id}.json", batch_id)
        if batch["status"] not in FINAL and self.is_cancelled(batch_id):
            batch["status"] = "cancelling"
        return batch

    def batches(self) -> list[Record]:
        """The newest first."""
        return [self.batch(record["id"]) for record in _sorted(self._batches.glob("*.json"))]

    def cancel(self, batch_id: str) -> None:
        """Ask for it; a batch that has ended stays as it is."""
        if self.batch(batch_id)["status"] not in FINAL:
            self._flag(batch_id).touch()

    def is_cancelled(self, batch_id: str) -> bool:
        return self._flag(batch_id).exists()

    def journal(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.journal"

    def _flag(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.cancel"

    def _folder(self, file_id: str) -> Path:
        _check_id(file_id)
        return self._files / file_id

    def _put_file(
        self, file_id: str, name: str, purpose: str, fill: Callable[[Callable[[bytes], Any]], None]
    ) -> Record:
        folder = self._files / file_id
        folder.mkdir()
        try:
            with written_whole(str(folder / "content")) as write:
                fill(write)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return self._describe(file_id, name, purpose)

    def _describe(self, file_id: str, name: str, purpose: str) -> Record:
        folder = self._files / file_id
        record: Record = {
            "id": file_id,
            "object": "file",
            "bytes": (folder / "content").stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
        }
        _write(folder / "file.json", record)
        return record


def _result_id(batch_id: str, kind: Result) -> str:
    """The same however often it is written."""
    return f"file-{batch_id.removeprefix('batch_')}{kind[0]}"


def _check_id(given: str) -> None:
    """An id becomes part of a path: nothing else may."""
    if not _ID.fullmatch(given):
        raise KeyError(given)


def _read(path: Path, record_id: str) -> Record:
    try:
        record: Record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise KeyError(record_id) from None
    return record


def _write(path: Path, record: Record) -> None:
    with written_whole(str(path)) as write:
        write(json.dumps(record).encode())


def _sorted(paths: Any) -> list[Record]:
    records = [json.loads(path.read_bytes()) for path in paths if path.exists()]
    return sorted(records, key=lambda record: (record["created_at"], record["id"]), reverse=True)
