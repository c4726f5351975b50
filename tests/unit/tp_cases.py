"""What each rank of a tensor-parallel test does; ranks need neither pytest nor transformers."""

from typing import Any

import torch
from paged_batches import chunked_logits

from workers.attention import select_backend
from workers.collectives import ProcessGroupCollectives
from workers.kernels.selection import select_kernels
from workers.models import load_model, read_model_config
from workers.tensor_parallel import TensorParallel

CPU = torch.device("cpu")


def model_logits(
    tp: TensorParallel, paths: list[str], sequences: list[list[int]], chunkings: list[list[list[int]]]
) -> list[list[list[Any]]]:
    """Per model and chunking: the logits of each sequence as a numpy array."""
    results = []
    for path in paths:
        backend = select_backend("auto", CPU, torch.float32, read_model_config(path).head_dim)
        model = load_model(path, tp, CPU, torch.float32, backend, select_kernels(CPU, torch.float32))
        results.append(
            [[x.numpy() for x in chunked_logits(model, tp, backend, sequences, chunks)] for chunks in chunkings]
        )
    return results


def collectives(tp: TensorParallel) -> dict[str, Any]:
    """Every collective once, over shards of 4, 3, 3, ... columns of the same random matrix."""
    sizes = [4] + [3] * (tp.size - 1)
    full = torch.randn(5, sum(sizes), generator=torch.Generator().manual_seed(3))
    full[0] = 1.0  # a tie over all ids
    full[1, -1] = full[1, 0] = 9.0  # a tie between the first rank and the last
    full[2, -1] = float("nan")
    start = sum(sizes[: tp.rank])
    shard = full[:, start : start + sizes[tp.rank]]
    best, ids = tp.argmax(shard, start)
    low_best, low_ids = tp.argmax(shard.bfloat16(), start)
    return {
        "sum": tp.all_reduce(torch.full((2,), float(tp.rank + 1))).tolist(),
        "sum_bf16": tp.all_reduce(torch.full((2,), float(tp.rank + 1), dtype=torch.bfloat16)).tolist(),
        "gathered_rows": tp.gather_vocab(shard[3:], sizes).equal(full[3:]),
        "gathered_bf16": tp.gather_vocab(shard[3:].bfloat16(), sizes).equal(full[3:].bfloat16()),
        "ids": ids.tolist(),
        "ids_expected": full.argmax(1).tolist(),
        "best": best.tolist(),
        "low_ids": low_ids[3:].tolist(),
        "low_ids_expected": full[3:].bfloat16().argmax(1).tolist(),
        "low_dtype": str(low_best.dtype),
        "total": tp.total(tp.rank + 1),
    }


def collectives_over_gloo(tp: TensorParallel) -> dict[str, Any]:
    """The same without shared memory."""
    return collectives(TensorParallel(tp.rank, tp.size, collectives=ProcessGroupCollectives(tp.size, CPU)))
