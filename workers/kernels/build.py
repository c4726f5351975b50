"""Compiles the kernels in `source/` for this machine's processor. Knows neither torch nor Python's headers.

The library lies in the user's cache, in a folder named by all that its code depends on: sources, compiler, flags
and the processor that `-march=native` means. It is built in a temporary folder, written through to the disk and
renamed into place, so that any number of processes may build at once and none ever waits for another or loads half
a file. Whoever builds removes what was used longest ago.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
LIBRARY = "kernels.so"
BUILD_SECONDS = 300.0
"""Deadline of one compiler call; building takes some twenty seconds."""
KEPT = 4
"""Libraries that stay: other checkouts and compilers of this user have theirs here too."""
_COMPILERS = ("g++", "clang++")
_BUILDING = "building-"
_END = b"\nthe end of the kernels\n"
"""Behind what the compiler wrote, where no loader looks."""
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which and how."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/chunkserve/kernels`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chunkserve" / "kernels"


def ensure_built(cache_dir: Path | None = None, anew: bool = False) -> Path:
    """The library for this machine, built now if it is not there, or in any case. Raises BuildError."""
    compiler = _compiler()
    try:
        target = (cache_dir or default_cache_dir()) / _key(compiler)
        if anew or not _is_whole(target / LIBRARY):
            _build(compiler, target)
            with contextlib.suppress(OSError):  # others remove too
                _remove_unused(target.parent)
        for path in (target.parent, target, target / LIBRARY):
            _refuse_foreign(path)
        with contextlib.suppress(OSError):  # it may be the system's
            os.utime(target)  # used last
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise BuildError(f"no folder for the compiled kernels: {error}") from error
    return target / LIBRARY


def _refuse_foreign(path: Path) -> None:
    """What is loaded runs as this user: nobody else may have written it. Raises BuildError."""
    found = path.lstat()
    if found.st_uid not in (os.getuid(), 0) or stat.S_ISLNK(found.st_mode) or found.st_mode & 0o022:
        raise BuildError(f"{path} could have been written by another user; remove it, or close it to others")


def _compiler() -> str:
    for name in _COMPILERS:
        if (path := shutil.which(name)) is not None:
            return path
    raise BuildError(f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the path")


def _sources() -> list[Path]:
    return sorted(SOURCE.glob("*.cpp"))


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    # What `-march=native` expands to, and the compiler's own version.
    digest.update(_run([compiler, "-march=native", "-E", "-v", "-xc++", os.devnull], "ask the compiler for its target"))
    digest.update(" ".join((compiler, *_FLAGS)).encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _build(compiler: str, target: Path) -> None:
    started = time.perf_counter()
    try:
        target.parent.parent.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=target.parent))
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}") from error
    try:
        _run([compiler, *_FLAGS, "-shared", *map(str, _sources()), "-o", str(folder / LIBRARY)], "compile the kernels")
        (folder / LIBRARY).chmod(0o700)  # whatever the umask
        with (folder / LIBRARY).open("ab") as library:
            library.write(_END)
            library.flush()
            os.fsync(library.fileno())
        target.mkdir(mode=0o700, exist_ok=True)
        (folder / LIBRARY).replace(target / LIBRARY)  # what others have built meanwhile is the same
    except OSError as error:
        raise BuildError(f"cannot put the kernels into {target}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    logger.info("compiled the kernels in %.1f s", time.perf_counter() - started)


def _is_whole(library: Path) -> bool:
    """To load one that is cut off may kill the process."""
    try:
        with library.open("rb") as file:
            return file.read().endswith(_END)
    except FileNotFoundError:
        return False


def _remove_unused(cache_dir: Path) -> None:
    """All but the KEPT libraries used last, and what builds that were killed have left. What is loaded stays loaded."""
    folders = [(path.stat().st_mtime, path) for path in cache_dir.iterdir() if path.is_dir()]
    built = sorted(entry for entry in folders if not entry[1].name.startswith(_BUILDING))
    abandoned = time.time() - 2 * BUILD_SECONDS
    for used, path in folders:
        if (used, path) in built[:-KEPT] or (path.name.startswith(_BUILDING) and used < abandoned):
            shutil.rmtree(path, ignore_errors=True)


def _run(command: list[str], what: str) -> bytes:
    """Both outputs of a command."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=BUILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"could not {what}: {error}") from error
    if done.returncode:
        raise BuildError(f"could not {what}: {done.stdout.decode(errors='replace')[-2000:]}")
    return done.stdout
