"""Exact order of a row's values: largest first, ties to the lowest token id, the same on every device."""

import torch

_LOW = (1 << 32) - 1


def rank(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best values of each row and their token ids (int64), both [rows, count].

    values: [rows, vocab] float32, without NaN. Value and id are packed into one integer key, so that no
    two are equal and the order in which a top-k meets ties cannot show.
    """
    bits = (values + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))  # ascending as integers where the floats are ascending
    low_ids_last = torch.arange(_LOW, _LOW - values.shape[1], -1, device=values.device)
    keys = bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(low_ids_last)
    best = keys.topk(count, dim=1).values if count < values.shape[1] else keys.sort(dim=1, descending=True).values
    ids = _LOW - best.bitwise_and_(_LOW)
    return values.gather(1, ids), ids
