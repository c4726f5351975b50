"""Deploys a running service's application again, with other settings: what a rolling update is to its clients.

python -m benchmarks.redeploy LAUNCHER_PID RAY_ADDRESS scheduler.max_num_batched_tokens=300

Runs in the environment of the service's Ray (see `faults.redeploy`) and returns when Serve says that the new
application runs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import ray
from ray import serve

from cluster.launch.app import build_app
from cluster.models.store import open_store
from cluster.settings.local_device import find_device
from cluster.settings.source import resolve
from cluster.settings.tree import APP_NAME, engine_settings, frontend_settings


def deploy_again(launcher: int, words: Sequence[str], address: str) -> None:
    """The launcher's own command line, and then `words`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--address")
    command = psutil.Process(launcher).cmdline()
    started, settings = parser.parse_known_args(command[command.index("serve") + 1 :])
    chosen = resolve(find_device(), started.config, [*settings, *words])
    resolved = chosen.settings
    model = str(open_store(print).resolve(resolved.model.path).directory)
    engine = engine_settings(resolved, model, chosen.device)
    ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    app = build_app(resolved, engine, frontend_settings(resolved, model))
    serve.run(app, name=APP_NAME, route_prefix="/")


def main(argv: Sequence[str]) -> int:
    """The launcher's process id, the address of its Ray, and settings."""
    launcher, address, *words = argv
    deploy_again(int(launcher), words, address)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
