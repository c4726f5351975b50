"""The entry point of `chunkserve`: makes sure that the packages are ours, then runs the command."""

import sys

from cluster.errors import ConfigError
from cluster.packages import check_packages


def main() -> int:
    """Run the command line; returns the exit status (see `cluster.commands`)."""
    try:
        check_packages()
    except ConfigError as error:
        print(f"chunkserve: {error}", file=sys.stderr)
        return 2
    from cluster import commands  # not before: it imports from packages whose origin was in doubt

    return commands.run()
