"""A peer's own virtual environment: made on first use in the user's cache, never mixed with ours."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkError

INSTALL_SECONDS = 1800.0
_COMPLETE = ".complete"


class PeerError(BenchmarkError):
    """A peer could not be installed; the message holds the end of what the installer wrote."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/chunkserve/peers`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "chunkserve" / "peers"


class PeerEnvironment:
    """One virtual environment. Nothing is installed before `ensure`."""

    def __init__(self, name: str, cache_dir: Path | None = None) -> None:
        """`name` says what is in it, versions included: another version is another environment."""
        major, minor = sys.version_info[:2]
        self.directory = (cache_dir or default_cache_dir()) / f"{name}-py{major}.{minor}"
        self.python = self.directory / "bin" / "python"

    @property
    def is_complete(self) -> bool:
        return (self.directory / _COMPLETE).exists()

    def ensure(self, install: Callable[["PeerEnvironment"], None]) -> None:
        """Make it and run `install` on it, unless an earlier call finished that; a half-made one is made anew.

        Raises PeerError.
        """
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with (self.directory.parent / f".{self.directory.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever holds it ends: every step below has a deadline
            if self.is_complete:
                return
            if self.directory.exists():
                shutil.rmtree(self.directory)
            print(f"installing into {self.directory}, which takes some minutes", flush=True)
            _run([sys.executable, "-m", "venv", str(self.directory)])
            install(self)
            (self.directory / _COMPLETE).touch()

    def pip_install(self, *arguments: str) -> None:
        """`pip install` with these arguments. Raises PeerError."""
        options = ["--quiet", "--no-input", "--disable-pip-version-check", "--timeout", "30", "--retries", "3"]
        _run([str(self.python), "-m", "pip", "install", *options, *arguments])

    def output_of(self, code: str) -> str:
        """What this Python code prints in the environment. Raises PeerError."""
        return _run([str(self.python), "-c", code])

    @property
    def site_packages(self) -> Path:
        """Raises PeerError when there is no environment."""
        return Path(self.output_of("import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{' '.join(command)} took longer than {INSTALL_SECONDS:.0f} s") from None
    except OSError as error:
        raise PeerError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
        raise PeerError(f"{' '.join(command)} ended with code {done.returncode}\n{tail}")
    return done.stdout
