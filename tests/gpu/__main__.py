"""`make gpu-check`: the tests in this folder, then a short benchmark. Without a GPU it says so and exits 0.

Needs torch, transformers, safetensors, numpy and pytest only, so that it runs on a bare GPU box.
"""

import os
import subprocess
import sys
from pathlib import Path

TEST_SECONDS = 240
BENCHMARK_SECONDS = 200

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, command: list[str], seconds: int) -> int:
    """Exit code of a Python command in the repository root; 1 when it takes longer than `seconds`."""
    helpers = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "unit")])
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": helpers}, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"gpu-check: {name} took longer than {seconds} s", file=sys.stderr)
        return 1


def main() -> int:
    """Exit code 1 when a test or the benchmark fails."""
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} finds no GPU here; nothing was checked")
        return 0
    # Without the project's pytest settings: they need plugins that a GPU box may not have.
    tests = ["-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", "tests/gpu"]
    failed = run("the tests", tests, TEST_SECONDS)
    failed |= run("the benchmark", ["-m", "benchmarks.gpu_check"], BENCHMARK_SECONDS)
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
