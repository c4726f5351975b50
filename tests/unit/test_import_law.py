"""The scheduler stands alone, and the three packages come from one place."""

import subprocess
import sys
from pathlib import Path

import cluster
import scheduler
import workers

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
import scheduler
for module in pkgutil.walk_packages(scheduler.__path__, "scheduler."):
    importlib.import_module(module.name)
print(*sys.modules)
"""


def test_scheduler_imports_nothing_heavy() -> None:
    root = Path(scheduler.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "scheduler.plan" in loaded
    assert not loaded & {"torch", "ray", "numpy", "msgspec"}
    ours = {name.partition(".")[0] for name in loaded}
    assert not ours & {"workers", "cluster"}


def test_scheduler_imports_the_standard_library_only() -> None:
    """In an interpreter without site-packages every module still loads."""
    root = Path(scheduler.__file__).parent.parent
    program = f"import sys; sys.path.insert(0, {str(root)!r})" + IMPORT_EVERYTHING
    subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=True)


def test_packages_come_from_one_directory() -> None:
    parents = {Path(package.__file__).resolve().parent.parent for package in (cluster, workers, scheduler)}
    assert len(parents) == 1
