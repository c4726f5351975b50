"""`chunkserve serve` with engines whose ranks can be poisoned (see `benchmarks.poison`).

python -m benchmarks.poisonable_service serve [--config FILE] [--address ADDR] [key=value ...]
"""

import sys
from unittest import mock

from cluster.cli import main
from cluster.engine.settings import EngineSettings
from cluster.frontend.settings import FrontendSettings
from cluster.launch.launcher import Launcher, RayRun


class PoisonableLauncher(Launcher):
    """Deploys that engine in the place of the real one."""

    def _serve(self, run: RayRun, engine: EngineSettings, frontend: FrontendSettings) -> None:
        import cluster.launch.app  # both import Ray, which must find its environment set
        from benchmarks.poisonable_engine import EngineReplica

        with mock.patch.object(cluster.launch.app, "EngineReplica", EngineReplica):
            super()._serve(run, engine, frontend)


if __name__ == "__main__":
    with mock.patch("cluster.launch.launcher.Launcher", PoisonableLauncher):
        sys.exit(main())
