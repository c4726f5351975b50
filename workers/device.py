"""The device of a rank: which one, its threads, its dtype, and copies to and from it."""

import os
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from workers.config import Dtype

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def select_device(name: str, rank: int) -> torch.device:
    """The rank's device. Ranks on one node share its GPUs in order; a process that sees one GPU takes that.

    Raises ValueError when "cuda" is asked for and there is none.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU (driver missing, or a CPU build of torch)")
    return torch.device("cuda", rank % torch.cuda.device_count())


def select_dtype(name: Dtype, device: torch.device, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """The dtype of weights, activations and KV. "auto": the checkpoint's on a GPU; on a CPU bfloat16 where the
    processor multiplies it natively (avx512_bf16 or amx), else float32, which is faster than emulating it.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return checkpoint_dtype
    return torch.bfloat16 if cpu_has_bfloat16(_CPU_INFO) else torch.float32


def cpu_has_bfloat16(cpu_info: Path) -> bool:
    """Whether the processor described by a file in /proc/cpuinfo's form has bfloat16 matrix instructions."""
    if not cpu_info.exists():
        return False
    for line in cpu_info.read_text().splitlines():
        if line.startswith("flags"):
            flags = line.split(":", 1)[1].split()
            return "avx512_bf16" in flags or "amx_bf16" in flags
    return False


def available_cores(cpu_quota: Path = _CPU_QUOTA) -> int:
    """Cores this process may use: its affinity, and in a container not more than the quota (cgroup v2 cpu.max)."""
    cores = len(os.sched_getaffinity(0))
    if cpu_quota.exists():
        quota, period = cpu_quota.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, made behind the work queued there. On a CPU the memory is shared, not copied."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # A fresh pinned buffer each time: torch's host allocator reuses it only after the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


class HostCopies:
    """Tensors on their way to the host, copied behind the work queued on their device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy; the tensor returned holds the values once `wait` came back."""
        if self._device.type != "cuda":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def seal(self) -> None:
        """Mark the end of the copies; call once after the last `add`."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Return when the device has made the copies. Work that hangs there is ended by the collectives' timeout."""
        if self._event is not None:
            self._event.synchronize()
