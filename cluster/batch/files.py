"""Input and output files: local paths, and whatever else fsspec opens."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from cluster.batch.lines import MAX_LINE_BYTES
from cluster.errors import ConfigError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file is known by, and how many lines it has."""

    size: int
    sha256: str
    num_lines: int


def identify(path: str) -> Identity:
    """Reads the whole file, in pieces. Raises ConfigError if it cannot be read."""
    digest = hashlib.sha256()
    size = num_lines = 0
    last = b""
    with _open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            num_lines += chunk.count(b"\n")
            last = chunk[-1:]
    return Identity(size, digest.hexdigest(), num_lines + (last not in (b"", b"\n")))


def read_lines(path: str, expected: Identity) -> Iterator[tuple[int, bytes]]:
    """Each line with its number, from 1. Of a line longer than MAX_LINE_BYTES only so much comes that this shows.

    Raises ConfigError if the file cannot be read, and at its end if it is not the one that was expected.
    """
    digest = hashlib.sha256()
    number = 0
    with _open(path) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            digest.update(line)
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_CHUNK_BYTES)
                digest.update(rest)
            yield number, line
    if digest.hexdigest() != expected.sha256:
        raise ConfigError(f"the input {path} was changed while it was read")


def local_path(path: str) -> Path | None:
    """The path on this machine, None for a file elsewhere. Raises ConfigError for an unknown kind of path."""
    system, name = _system_of(path)
    return Path(name) if isinstance(system, LocalFileSystem) else None


def exists(path: str) -> bool:
    """Whether there is such a file. Raises ConfigError if that cannot be told."""
    system, name = _system_of(path)
    with _explained(path):
        return bool(system.exists(name))


def remove(path: str) -> None:
    """Remove the file if it is there."""
    system, name = _system_of(path)
    with _explained(path), contextlib.suppress(FileNotFoundError):
        system.rm_file(name)


@contextlib.contextmanager
def written_whole(path: str) -> Iterator[Callable[[bytes], Any]]:
    """Yields a function that writes; the file is there when all is written, or it is not there.

    A local file is written beside its place, put on the disk and renamed. Elsewhere the file system's own transaction
    does that: objects in a store appear when their upload is complete. Raises ConfigError if it cannot be written.
    """
    system, name = _system_of(path)
    local = local_path(path)
    with _explained(path):
        if local is None:
            with system.transaction, system.open(name, "wb") as file:
                yield file.write
            return
        beside = local.with_name(f"{local.name}.part")
        with beside.open("wb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
        replace(beside, local)


def replace(source: Path, target: Path) -> None:
    """Rename, and put that on the disk."""
    source.rename(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    with _explained(path), fsspec.open(path, "rb") as file:
        yield file


def _system_of(path: str) -> tuple[Any, str]:
    with _explained(path):
        system, name = url_to_fs(path)
        return system, str(name)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ImportError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: {cause}") from error
