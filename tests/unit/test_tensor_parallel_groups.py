"""Groups of two and three ranks: the collectives, and whole models against the float32 reference."""

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import KINDS, VOCAB_SIZE, reference_logits, tiny_model
from tp_cases import collectives, collectives_over_gloo, model_logits
from tp_ranks import free_rendezvous, run_ranks

from workers.actor import listen_for_ranks
from workers.interface import interface_of, local_address
from workers.tensor_parallel import TensorParallel

_RANK_1 = """
import sys, torch
from workers.tensor_parallel import TensorParallel
tp = TensorParallel.connect(1, 2, sys.argv[1], torch.device("cpu"), 60.0)
assert tp.total(2) == 3
tp.close()
"""


def run_rank_1(rendezvous: str) -> None:
    subprocess.run([sys.executable, "-c", _RANK_1, rendezvous], timeout=60, check=True)


GENERATOR = torch.Generator().manual_seed(11)
SEQUENCES = [torch.randint(VOCAB_SIZE, (n,), generator=GENERATOR).tolist() for n in (70, 33)]
CHUNKINGS = [[[70], [33]], [[30, 1, 1, 30, 8], [5, 20, 1, 1, 6]]]


@pytest.mark.parametrize(("size", "case"), [(2, collectives), (3, collectives), (3, collectives_over_gloo)])
def test_collectives_agree_on_every_rank(size: int, case: Callable[[TensorParallel], dict[str, Any]]) -> None:
    results = run_ranks(size, case)
    for result in results:
        assert result["sum"] == result["sum_bf16"] == [size * (size + 1) / 2] * 2
        assert result["gathered_rows"]
        assert result["gathered_bf16"]
        assert result["ids"] == result["ids_expected"]
        assert result["ids"][:2] == [0, 0]  # ties go to the lowest id
        assert math.isnan(result["best"][2])
        assert result["low_ids"] == result["low_ids_expected"]
        assert result["low_dtype"] == "torch.bfloat16"
        assert result["total"] == size * (size + 1) // 2


@pytest.mark.parametrize("size", [2, 3])
def test_models_equal_the_reference_and_ranks_each_other(size: int) -> None:
    results = run_ranks(size, model_logits, [tiny_model(kind) for kind in KINDS], SEQUENCES, CHUNKINGS)
    for i, kind in enumerate(KINDS):
        expected = [reference_logits(tiny_model(kind), sequence).numpy() for sequence in SEQUENCES]
        for j, chunks in enumerate(CHUNKINGS):
            for k, want in enumerate(expected):
                difference = np.abs(results[0][i][j][k] - want).max()
                assert difference < 1e-4, f"{kind}, {size} ranks, chunks {chunks[k]}: off by {difference}"
                for rank in range(1, size):
                    assert np.array_equal(results[0][i][j][k], results[rank][i][j][k]), f"{kind}, rank {rank}"


def test_four_ranks_share_one_kv_head() -> None:
    path = tiny_model("mistral")  # 6 query heads of one KV head: 2, 2, 1 and 1
    results = run_ranks(4, model_logits, [path], SEQUENCES[:1], [CHUNKINGS[1][:1]])
    difference = np.abs(results[3][0][0][0] - reference_logits(path, SEQUENCES[0]).numpy()).max()
    assert difference < 1e-4


def test_a_group_of_one_needs_no_rendezvous() -> None:
    tp = TensorParallel.connect(0, 1, "", torch.device("cpu"), 1.0)
    shard = torch.tensor([[1.0, 3.0, 3.0]])
    assert tp.all_reduce(shard) is shard
    assert tp.gather_vocab(shard, [3]) is shard
    assert [x.tolist() for x in tp.argmax(shard, 0)] == [[3.0], [1]]
    assert tp.total(4) == 4
    tp.close()


def test_ranks_that_come_first_dial_until_rank_0_is_there() -> None:
    listener, rendezvous = listen_for_ranks("127.0.0.1")
    with ThreadPoolExecutor(1) as pool, socket.socket() as rival:
        with pytest.raises(OSError, match="in use"):  # nobody takes the port meanwhile
            rival.bind(listener.getsockname())
        first = pool.submit(run_rank_1, rendezvous)
        with pytest.raises(TimeoutError):
            first.result(timeout=1.0)
        tp = TensorParallel.connect(0, 2, rendezvous, torch.device("cpu"), 60.0, listener)
        assert tp.total(1) == 3
        tp.close()
        first.result(timeout=60.0)
    assert listener.fileno() == -1  # taken over


def test_a_missing_rank_is_an_error_that_names_the_rendezvous() -> None:
    rendezvous = free_rendezvous()
    # Its own process: torch keeps state of a failed rendezvous.
    code = (
        "import torch\nfrom workers.tensor_parallel import TensorParallel\n"
        f"TensorParallel.connect(0, 2, {rendezvous!r}, torch.device('cpu'), 1.0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"RuntimeError: rank 0 of 2 could not join the group at {rendezvous}" in done.stderr


@pytest.mark.parametrize("rendezvous", ["127.0.0.1:80", "tcp://127.0.0.1", "file:///tmp/x"])
def test_a_rendezvous_of_another_form_is_refused(rendezvous: str) -> None:
    with pytest.raises(ValueError, match="it must read tcp://host:port"):
        TensorParallel.connect(0, 2, rendezvous, torch.device("cpu"), 1.0)


def test_the_interface_of_this_nodes_addresses() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert os.path.exists(f"/sys/class/net/{loopback}")
    assert interface_of("127.0.1.1") == interface_of("::1") == loopback
    assert interface_of("203.0.113.77") is None  # an address reserved for documentation
    assert local_address("127.0.0.1", 9) == "127.0.0.1"
