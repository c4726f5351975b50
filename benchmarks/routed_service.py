"""`chunkserve serve` whose ranks have one thread each: a machine that stands for several (see `benchmarks.routing`).

python -m benchmarks.routed_service serve [--config FILE] [--address ADDR] [key=value ...]

With more threads a replica that gets more than its share would also get more of the machine.
"""

import sys
from dataclasses import replace
from unittest import mock

from cluster.cli import main
from cluster.engine.settings import EngineSettings
from cluster.frontend.settings import FrontendSettings
from cluster.launch.launcher import Launcher, RayRun


class OneThreadLauncher(Launcher):
    """Deploys such engines."""

    def _serve(self, run: RayRun, engine: EngineSettings, frontend: FrontendSettings) -> None:
        super()._serve(run, replace(engine, worker=replace(engine.worker, num_threads=1)), frontend)


if __name__ == "__main__":
    with mock.patch("cluster.launch.launcher.Launcher", OneThreadLauncher):
        sys.exit(main())
