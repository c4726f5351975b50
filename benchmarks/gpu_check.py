"""Steps of one rank on this GPU: decode batches and mixed steps against what the hardware allows.

The floor of a step is the larger of the time its bytes take (weights once, keys and values of every
token attended to) at the copy bandwidth measured here, and the time its multiplications take at the
matrix rate measured here. Plans are the scheduler's, two in flight. Without a GPU it says so and exits 0.

    python -m benchmarks gpu_check
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.random_model import ONE_BILLION, TINY, LlamaShape, write_model
from benchmarks.summary import table
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan
from scheduler.request import Request, RequestStatus
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from workers.config import WorkerConfig
from workers.model_runner import PendingStep
from workers.worker import Worker

DTYPE = torch.bfloat16
OVERLAP_DEPTH = 2
WARM_STEPS = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run."""

    shape: LlamaShape
    context: int
    """Tokens each decoding request has at first."""
    batches: tuple[int, ...]
    mixed_batch: int
    chunk: int
    """Tokens of the prompt in each mixed step."""
    num_steps: int
    copy_bytes: int
    matrix: int


FULL = Sizes(ONE_BILLION, 1024, (1, 16, 64, 256), 64, 512, 40, 2 << 30, 8192)
SMALL = Sizes(TINY, 32, (1, 3), 2, 16, 6, 1 << 20, 64)
"""For checking the check itself."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of the device."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step must at least do."""

    num_tokens: int
    weight_bytes: int
    kv_bytes: int

    def floor_seconds(self, machine: Machine) -> float:
        """Two operations a weight and token; attention's own are few beside them at these lengths."""
        num_weights = self.weight_bytes / DTYPE.itemsize
        moving = (self.weight_bytes + self.kv_bytes) / machine.bytes_per_second
        multiplying = 2 * num_weights * self.num_tokens / machine.flops_per_second
        return max(moving, multiplying)


class Bench:
    """One worker under the real scheduler, two plans in flight."""

    def __init__(self, model_path: str, sizes: Sizes, device: str) -> None:
        """Loads the model. Raises what the worker raises."""
        most = max(*sizes.batches, sizes.mixed_batch)
        self._sizes = sizes
        config = WorkerConfig(
            model_path=model_path,
            # Prompts of mixed steps hold places until their result is known.
            max_num_seqs=most + 2 * OVERLAP_DEPTH,
            max_num_batched_tokens=max(8192, most + sizes.chunk),
            max_model_len=sizes.context + 4 * (sizes.num_steps + WARM_STEPS),
            device="cuda" if device == "cuda" else "cpu",
            dtype="bfloat16",
            num_blocks=0 if device == "cuda" else 256,
        )
        self._worker = Worker(config)
        self._worker.load()
        self.limits = self._worker.measure()
        self._worker.allocate(self.limits)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=self.limits.max_model_len,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                block_size=self.limits.block_size,
                enable_prefix_caching=False,
                overlap_depth=OVERLAP_DEPTH,
            ),
            self.limits.num_blocks,
        )
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._names = (f"request-{number}" for number in itertools.count())
        self._open: list[str] = []

    def decode(self, batch: int) -> float:
        """Seconds of a step in which `batch` requests decode, the median."""
        return self._median(batch, lambda: None)

    def mixed(self, batch: int) -> float:
        """The same with a whole prompt of `chunk` tokens in each step."""
        return self._median(batch, lambda: self._add(self._sizes.chunk, 1))

    def _median(self, batch: int, before_plan: Callable[[], None]) -> float:
        room = self.limits.max_model_len - self._sizes.context
        for _ in range(batch):
            self._add(self._sizes.context, room)
        while self._scheduler.stats().num_requests_waiting:
            self._step(lambda: None)
        for _ in range(WARM_STEPS):
            self._step(before_plan)
        seconds = []
        for _ in range(self._sizes.num_steps):
            began = time.perf_counter()
            self._step(before_plan)
            seconds.append(time.perf_counter() - began)
        self._end_all()
        return statistics.median(seconds)

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        name = next(self._names)
        tokens = [1 + index % (self.limits.vocab_size - 1) for index in range(num_tokens)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._scheduler.add_request(Request(name, tokens, params, arrival_time=time.time()))
        self._open.append(name)

    def _step(self, before_plan: Callable[[], None]) -> None:
        """Fill the pipe and take the oldest result."""
        while len(self._in_flight) < OVERLAP_DEPTH:
            before_plan()
            plan = self._scheduler.schedule()
            if plan is None:
                break
            self._in_flight.append((plan, self._worker.launch_step(plan)))
        self._take_result()

    def _take_result(self) -> None:
        plan, pending = self._in_flight.popleft()
        for output in self._scheduler.update_from_result(plan, self._worker.collect_step(pending)):
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            if output.finish_reason is not None:
                self._open.remove(output.request_id)

    def _end_all(self) -> None:
        for name in self._open:
            self._scheduler.finish_request(name, RequestStatus.FINISHED_ABORTED)
        self._open.clear()
        while self._in_flight:
            self._take_result()


def measure_machine(device: str, sizes: Sizes) -> Machine:
    """Bandwidth of a copy (read and written bytes counted) and the rate of a bfloat16 matrix product."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.ones(sizes.matrix, sizes.matrix, dtype=DTYPE, device=device) for _ in range(2))
    copying = _median_seconds(lambda: target.copy_(source), device)
    multiplying = _median_seconds(lambda: left @ right, device)
    return Machine(2 * sizes.copy_bytes / copying, 2 * sizes.matrix**3 / multiplying)


def _median_seconds(work: Callable[[], object], device: str, repeats: int = 20) -> float:
    seconds = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:])


def run(device: str, sizes: Sizes) -> str:
    """Measure everything; the table."""
    machine = measure_machine(device, sizes)
    with tempfile.TemporaryDirectory(prefix="chunkserve-gpu-check-") as folder:
        weight_bytes = write_model(sizes.shape, Path(folder), DTYPE)
        bench = Bench(folder, sizes, device)
    kv_bytes = sizes.context * sizes.shape.kv_bytes(DTYPE)
    rows = []
    for batch in sizes.batches:
        cost = StepCost(batch, weight_bytes, batch * kv_bytes)
        rows.append(_row(f"decode {batch}", cost, bench.decode(batch), machine))
    cost = StepCost(sizes.mixed_batch + sizes.chunk, weight_bytes, sizes.mixed_batch * kv_bytes)
    rows.append(_row(f"mixed {sizes.mixed_batch} + {sizes.chunk}", cost, bench.mixed(sizes.mixed_batch), machine))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    bandwidth, rate = machine.bytes_per_second / 1e12, machine.flops_per_second / 1e12
    header = ["step", "tokens", "step ms", "tokens/s", "floor ms", "floor / step"]
    return "\n".join([
        f"{name}: copy {bandwidth:.2f} TB/s, bfloat16 {rate:.0f} TFLOP/s",
        f"random Llama, {weight_bytes / 1e9:.2f} GB of weights, context {sizes.context}, "
        f"{bench.limits.num_blocks} KV blocks of {bench.limits.block_size}",
        "",
        table(header, rows),
    ])  # fmt: skip


def _row(name: str, cost: StepCost, seconds: float, machine: Machine) -> list[object]:
    floor = cost.floor_seconds(machine)
    times = [f"{seconds * 1e3:.2f}", f"{cost.num_tokens / seconds:.0f}", f"{floor * 1e3:.2f}"]
    return [name, cost.num_tokens, *times, f"{floor / seconds:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, also without a GPU."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small-on-cpu", action="store_true", help="check this check: a tiny model on the CPU")
    args = parser.parse_args(argv)
    if args.small_on_cpu:
        print(run("cpu", SMALL))
        return 0
    if not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU here; nothing was measured")
        return 0
    print(run("cuda", FULL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
