"""The sampling parameters of the requests in the mirror, one array a parameter and one slot a request."""

import numpy as np
import numpy.typing as npt

from scheduler.sampling_params import SamplingParams
from workers.kernels.sampling import PARAMETERS

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

MIN_TEMPERATURE = 1e-5
"""Positive temperatures below this are raised to it: nothing but exact ties could tell them apart."""


class SamplingTable:
    """Arrays of shape [num_slots]; a step picks its rows from them by slot."""

    def __init__(self, num_slots: int) -> None:
        self.parameters = np.zeros(num_slots, PARAMETERS)
        """What the draw itself depends on, side by side; the arrays of single parameters are views of it."""
        self.parameters_address = self.parameters.ctypes.data
        self.temperature: FloatArray = self.parameters["temperature"]
        self.top_k: IntArray = self.parameters["top_k"]
        """0 is off, as in SamplingParams."""
        self.top_p: DoubleArray = self.parameters["top_p"]
        self.min_p: DoubleArray = self.parameters["min_p"]
        self.repetition_penalty: FloatArray = self.parameters["repetition_penalty"]
        self.presence_penalty: FloatArray = self.parameters["presence_penalty"]
        self.frequency_penalty: FloatArray = self.parameters["frequency_penalty"]
        self.seed: IntArray = self.parameters["seed"]
        """The unsigned 64-bit seed's bits as a signed integer."""
        self.top_p[:] = 1.0
        self.repetition_penalty[:] = 1.0
        self.min_tokens: IntArray = np.zeros(num_slots, np.int64)
        """0 also where there is nothing to mask."""
        self.num_logprobs: IntArray = np.full(num_slots, -1, np.int64)
        """-1: none are wanted."""
        self.num_prompt_logprobs: IntArray = np.full(num_slots, -1, np.int64)
        self.has_penalties: BoolArray = np.zeros(num_slots, np.bool_)
        self.has_bias: BoolArray = np.zeros(num_slots, np.bool_)
        self.may_add: BoolArray = np.zeros(num_slots, np.bool_)
        """Whether there is a bias, or are tokens to be forbidden at first."""
        self.stop_token_ids: list[IntArray] = [np.zeros(0, np.int64)] * num_slots
        self.bias_ids: list[IntArray] = [np.zeros(0, np.int64)] * num_slots
        self.biases: list[FloatArray] = [np.zeros(0, np.float32)] * num_slots
        """What is added to the logits of `bias_ids`."""

    def set(self, slot: int, params: SamplingParams) -> None:
        """Overwrite every parameter of a slot."""
        self.temperature[slot] = max(params.temperature, MIN_TEMPERATURE) if params.temperature > 0 else 0.0
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.seed[slot] = np.uint64(params.seed).astype(np.int64)
        self.min_tokens[slot] = params.min_tokens if params.stop_token_ids else 0
        self.num_logprobs[slot] = -1 if params.num_logprobs is None else params.num_logprobs
        self.num_prompt_logprobs[slot] = -1 if params.num_prompt_logprobs is None else params.num_prompt_logprobs
        self.has_penalties[slot] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.has_bias[slot] = bool(params.logit_bias)
        self.may_add[slot] = self.has_bias[slot] or self.min_tokens[slot] > 0
        self.stop_token_ids[slot] = np.array(params.stop_token_ids, np.int64)
        self.bias_ids[slot] = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self.biases[slot] = np.array([bias for _, bias in params.logit_bias], np.float32)

    def needs_distribution(self, slots: IntArray, output_positions: IntArray) -> BoolArray:
        """Which rows need all their logits, not just the largest one. Both arguments and the result: [rows]."""
        wanted: BoolArray = (
            (self.temperature[slots] > 0)
            | self.has_penalties[slots]
            | self.has_bias[slots]
            | (self.num_logprobs[slots] >= 0)
            | (output_positions < self.min_tokens[slots])
        )
        return wanted
