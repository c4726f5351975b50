"""`python -m benchmarks NAME [options]`, or `make bench ARGS="NAME [options]"`; without a name, scheduler_cost."""

import importlib
import signal
import sys
from pathlib import Path

NAMES = (
    "scheduler_cost",
    "control_plane",
    "breakdown",
    "loadgen",
    "chunked_prefill",
    "disconnects",
    "faults",
    "survival",
    "two_nodes",
    "autoscaling",
    "batch_kills",
    "gpu_check",
    "all_reduce_speed",
    "attention_speed",
    "linear_speed",
    "sampling_speed",
    "side_by_side",
    "routing",
)


def main(argv: list[str]) -> int:
    """Run one benchmark with the rest of the arguments; its exit code, 2 where it cannot be made."""
    name, *rest = argv or ["scheduler_cost"]
    if name in ("-h", "--help"):
        print(f"{__doc__} Benchmarks: {', '.join(NAMES)}; --help after a name shows its options.")
        return 0
    if name not in NAMES:
        print(f"no benchmark is called {name!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    # Told to end, a benchmark ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # `python benchmarks` puts this folder on the path, and not the one above it.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    benchmark = importlib.import_module(f"benchmarks.{name}")
    from benchmarks.errors import BenchmarkError
    from cluster.errors import ChunkserveError

    try:
        return int(benchmark.main(rest))
    except (BenchmarkError, ChunkserveError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
