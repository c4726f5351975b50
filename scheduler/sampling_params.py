"""How one request samples. Validated by the front end; every room below trusts it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one choice (the front end expands `n` into one request a choice).

    `seed` is always set: the front end draws one where the client gave none, and choice i of n uses
    seed + i. Noise is a function of (seed, output position, token id), so there is no generator
    state and neighbours in a batch cannot matter.
    """

    max_tokens: int
    """Most tokens to generate, at least 1; the model length may end it before."""
    min_tokens: int = 0
    """`stop_token_ids` are masked until this many tokens were generated."""
    temperature: float = 1.0
    """0 is greedy: the largest logit, ties to the lowest token id."""
    top_k: int = 0
    """Keep the k largest logits; 0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as in Hugging Face transformers."""
    presence_penalty: float = 0.0
    """Over output tokens, as in the OpenAI API."""
    frequency_penalty: float = 0.0
    seed: int = 0
    """Unsigned 64-bit."""
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the request: the caller's, and the model's eos ids unless `ignore_eos`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs, added to the logits before temperature."""
    num_logprobs: int | None = None
    """Log-probabilities of the sampled token and this many best; None: none are computed."""
    num_prompt_logprobs: int | None = None
    """The same for each prompt token (`echo` with logprobs); skips the prefix cache lookup."""
