"""The import names `scheduler`, `workers` and `cluster` are common words: make sure that all three are ours."""

from importlib.util import find_spec
from pathlib import Path

from cluster.errors import ConfigError

NAMES = ("scheduler", "workers", "cluster")
ROOT = Path(__file__).resolve().parent.parent
"""The directory that holds this package: where its other processes start, so that they import the same code."""


def check_packages() -> Path:
    """The directory that holds all three packages.

    Raises ConfigError naming the place of each when another distribution of the same name comes first.
    """
    parents: dict[str, Path | None] = {}
    for name in NAMES:
        spec = find_spec(name)
        parents[name] = Path(spec.origin).resolve().parent.parent if spec is not None and spec.origin else None
    if set(parents.values()) != {ROOT}:
        places = ", ".join(f"{name} from {parent or 'nowhere'}" for name, parent in parents.items())
        raise ConfigError(
            f"chunkserve's packages must come from one directory ({ROOT}), but Python finds {places};"
            " uninstall the other distribution or change the order of sys.path"
        )
    return ROOT
