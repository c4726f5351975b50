"""`benchmarks.routed_service` with Serve's PrefixCacheAffinityRouter (see `benchmarks.routing`).

python -m benchmarks.affinity_service serve [--config FILE] [--address ADDR] [key=value ...]
"""

import sys
from dataclasses import replace
from unittest import mock

from benchmarks.routed_service import OneThreadLauncher
from cluster.cli import main
from cluster.engine.settings import EngineSettings
from cluster.frontend.settings import FrontendSettings
from cluster.launch.launcher import RayRun


class AffinityLauncher(OneThreadLauncher):
    """Deploys that router in the place of ours, and front ends that ask engines for no reports."""

    def _serve(self, run: RayRun, engine: EngineSettings, frontend: FrontendSettings) -> None:
        import cluster.launch.app  # imports Ray, which must find its environment set
        from benchmarks.affinity_router import AffinityRouter

        with mock.patch.dict(cluster.launch.app.ROUTERS, predicted=AffinityRouter):
            super()._serve(run, engine, replace(frontend, uses_views=False))


if __name__ == "__main__":
    with mock.patch("cluster.launch.launcher.Launcher", AffinityLauncher):
        sys.exit(main())
