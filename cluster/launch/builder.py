"""The application as Serve builds it from a configuration file or a RayService, without a launcher.

    import_path: cluster.launch.builder:build
    args: {model: {path: ..., device: cuda}, parallel: {...}, ...}

`args` is the tree of settings. The model must be on every node under the same path (`chunkserve prepare`).
"""

import logging
from typing import Any

from cluster.launch.app import build_app
from cluster.models.store import open_store
from cluster.settings.source import resolve
from cluster.settings.tree import Device, engine_settings, frontend_settings

logger = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Any:
    """The application of these settings. Raises ConfigError or ModelError with the cause.

    Serve calls it on any node of the cluster: so nothing is taken from the machine it runs on, and what it builds is
    the same everywhere. GPUs must therefore be asked for by `model.device: cuda`.
    """
    resolved = resolve(Device(), tree=args)
    settings = resolved.settings
    model = open_store(logger.info).resolve(settings.model.path)
    engine = engine_settings(settings, str(model.directory), resolved.device)
    return build_app(settings, engine, frontend_settings(settings, str(model.directory)))
