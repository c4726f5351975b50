"""Helpers of the unit tests for these tests too, and a Ray of their own."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A Ray with six logical CPUs in a directory of its own, ended with the module."""
    import ray

    with pytest.MonkeyPatch.context() as environment, tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as folder:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        environment.setenv("RAY_kill_worker_timeout_milliseconds", "500")
        # Ray's processes import our packages from here, wherever the tests were started.
        environment.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        ray.init(
            address="local",
            num_cpus=6,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()
