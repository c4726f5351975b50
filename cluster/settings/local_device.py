"""What this machine computes on, found without importing torch where there is plainly no GPU."""

from pathlib import Path

from cluster.settings.tree import GIB, Device

_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""NVIDIA's driver, the one of Windows' Linux subsystem, AMD's."""


def find_device() -> Device:
    """The first GPU that torch can use, else the CPU."""
    if not any(Path(name).exists() for name in _DRIVER_FILES):
        return Device()
    import torch

    if not torch.cuda.is_available():
        return Device()
    return Device("cuda", torch.cuda.get_device_properties(0).total_memory / GIB)
