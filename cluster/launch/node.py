"""What a node needs before engines and front ends may start on it: the model, and the kernels of its processor.

`chunkserve serve` does it for the machine it runs on. In a cluster each node does it for itself, before Ray starts.
"""

from collections.abc import Callable

from cluster.launch.kernel_build import KernelBuild
from cluster.models.store import open_store
from cluster.settings.source import ResolvedSettings


def prepare(resolved: ResolvedSettings, say: Callable[[str], None]) -> None:
    """Fetch the model unless it is here, and compile the kernels unless a GPU computes. Raises ModelError.

    Without kernels the service runs, slower: that is said and is no error.
    """
    kernels = None if resolved.device.kind == "cuda" else KernelBuild()
    model = open_store(say).resolve(resolved.settings.model.path)
    say(f"model {resolved.settings.model.path} from {model.source}: {model.directory} ({model.seconds:.1f} s)")
    if kernels is not None:
        kernels.wait(say)
