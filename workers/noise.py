"""Gumbel noise without a generator: a pure function of (seed, output position, token id).

The noise of a token is an element of a SplitMix64 stream (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", 2014), which is random access:

    mix(x)     = Stafford's 13th variant of the 64-bit finaliser of MurmurHash3
    key        = mix(mix(seed + GAMMA) + position * GAMMA)         one stream for a row
    hash       = mix(key + (token_id + 1) * GAMMA)                  all modulo 2^64
    u          = (top 52 bits of hash + 0.5) / 2^52                 strictly between 0 and 1
    noise      = -log(-log(u))                                      finite, between -3.6 and 36.8

Argmax of logits plus this noise is a sample of their softmax (the Gumbel-max trick). Nothing else enters:
neither the neighbours in the batch, nor the order of steps, nor what was drawn before.
"""

import torch

GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer: 2^64 over the golden ratio, odd
_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise in float64, [rows, tokens].

    seeds, positions: [rows] int64, a seed being the bits of an unsigned 64-bit integer.
    token_ids: int64, [rows, tokens], or [1, tokens] for the same tokens in every row.
    """
    keys = _mix(_mix(seeds + GAMMA) + positions * GAMMA)
    hashes = _mix(keys.unsqueeze(1) + (token_ids + 1) * GAMMA)
    uniform = _shift_right(hashes, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Overwrites and returns its argument, int64; products wrap modulo 2^64."""
    for shift, factor in _ROUNDS:
        x.bitwise_xor_(_shift_right(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical shift: torch's own copies the sign."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
