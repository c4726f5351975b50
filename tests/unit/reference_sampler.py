"""Sampling one row at a time in float64 numpy, as slow and plain as the definitions."""

import math

import numpy as np
import numpy.typing as npt
import torch

from scheduler.sampling_params import SamplingParams
from workers.noise import gumbel_noise

Row = npt.NDArray[np.float64]


def process(logits: Row, tokens: list[int], num_prompt: int, params: SamplingParams) -> Row:
    """Logits after bias, masks and penalties; `tokens` is the context."""
    logits = logits.copy()
    for token, bias in params.logit_bias:
        logits[token] += bias
    output = tokens[num_prompt:]
    if len(output) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -math.inf
    for token in set(tokens):
        factor = params.repetition_penalty
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return logits


def ranked_ids(values: Row) -> list[int]:
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def kept_ids(logits: Row, params: SamplingParams) -> list[int]:
    """Tokens that top_k, top_p and min_p leave, best first; `logits` are divided by the temperature already."""
    ids = ranked_ids(logits)
    if params.top_k:
        ids = ids[: params.top_k]
    weights = [math.exp(logits[token] - logits[ids[0]]) for token in ids]
    if params.top_p < 1:
        total, before, kept = sum(weights), 0.0, 0
        while kept < len(ids) and before < params.top_p * total:
            before += weights[kept]
            kept += 1
        ids, weights = ids[:kept], weights[:kept]
    return [token for token, weight in zip(ids, weights, strict=True) if weight >= params.min_p * weights[0]]


def sample_row(logits: Row, tokens: list[int], num_prompt: int, params: SamplingParams) -> int:
    logits = process(logits, tokens, num_prompt, params)
    if params.temperature == 0:
        return ranked_ids(logits)[0]
    logits = logits / params.temperature
    ids = kept_ids(logits, params)
    seed = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([len(tokens) - num_prompt]), torch.tensor([ids]))[0]
    return max(zip(ids, noise.tolist(), strict=True), key=lambda pair: logits[pair[0]] + pair[1])[0]


def log_softmax(logits: Row) -> Row:
    shifted = logits - logits.max()
    result: Row = shifted - math.log(np.exp(shifted).sum())
    return result
