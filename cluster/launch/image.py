"""Run once when an image is built: puts the starter of HAProxy where the image's environment names it.

python -m cluster.launch.image DIRECTORY
"""

import sys
from pathlib import Path

from cluster.launch.proxy import find_haproxy, write_proxy_starter


def main(directory: Path) -> int:
    """Write the starter and its rules; 1 if there is no HAProxy to start."""
    haproxy = find_haproxy()
    if haproxy is None:
        print("there is no HAProxy: install ray[serve] or haproxy first", file=sys.stderr)
        return 1
    directory.mkdir(parents=True, exist_ok=True)
    starter = write_proxy_starter(directory, haproxy)
    # Whoever runs the image may start it, and nobody there may change it.
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o755 if file == starter else 0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
