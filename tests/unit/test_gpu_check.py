"""The GPU check's arithmetic, and the whole of it on a tiny model without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import DTYPE, SMALL, Machine, StepCost, run
from benchmarks.random_model import ONE_BILLION, TINY, tensor_shapes, write_model
from workers.models import read_model_config

MACHINE = Machine(bytes_per_second=1e9, flops_per_second=1e12)


def test_a_step_is_bound_by_what_it_moves_or_by_what_it_multiplies() -> None:
    weights = 10**9
    assert StepCost(1, weights, 10**9).floor_seconds(MACHINE) == pytest.approx(2.0)
    assert StepCost(4000, weights, 0).floor_seconds(MACHINE) == pytest.approx(
        2 * weights / DTYPE.itemsize * 4000 / 1e12
    )


def test_the_random_model_is_a_checkpoint_of_its_size(tmp_path: Path) -> None:
    num_bytes = write_model(TINY, tmp_path, DTYPE)
    config = read_model_config(str(tmp_path))
    assert (config.hidden_size, config.num_kv_heads, config.vocab_size) == (64, 2, 300)
    assert config.dtype == DTYPE
    assert num_bytes == (tmp_path / "model.safetensors").stat().st_size - _header_bytes(tmp_path)
    elements = sum(torch.Size(size).numel() for size in tensor_shapes(ONE_BILLION).values())
    assert 1.0e9 < elements < 1.3e9
    assert TINY.kv_bytes(DTYPE) == 2 * 2 * 2 * 16 * 2


def _header_bytes(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_the_check_runs_every_step_and_shows_it() -> None:
    lines = run("cpu", SMALL).splitlines()
    rows = [line.split("  ")[0] for line in lines[5:]]
    assert rows == ["decode 1", "decode 3", "mixed 2 + 16"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_succeeds() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "tests/gpu"], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert "finds no GPU" in done.stdout
