"""What is asked of a server: fixed lengths, fresh contents.

| name | requests                                                                                      |
|------|-----------------------------------------------------------------------------------------------|
| W1   | six steady streams (64-token prompts), while five 1,500-token prompts arrive two seconds apart |
| W1b  | the six steady streams alone, 200 tokens each                                                 |
| W2   | throughput: 64 prompts of 32 to 256 tokens, 64 tokens each, 16 at a time                       |
| W3   | a shared prefix of 1,024 tokens: 24 prompts, 32 more tokens each, 32 out, 8 at a time          |
| W4   | a single stream: a 32-token prompt, 200 tokens                                                |

Contents change with the seed, so that no run is answered from an earlier run's prefix cache.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.errors import BenchmarkError

Prompt = list[int] | str

NAMES = ("W1", "W1b", "W2", "W3", "W4")

LONG_PROMPT_TOKENS = 1500
STEADY_STREAMS = 6


class PromptSource(Protocol):
    """Makes prompts of known length."""

    def ids(self, rng: random.Random, num_tokens: int) -> list[int]: ...

    def render(self, ids: Sequence[int]) -> Prompt:
        """What is sent for these tokens."""


class TokenIds:
    """Random token ids, sent as ids. The range leaves out special tokens."""

    def __init__(self, low: int = 1000, high: int = 40000) -> None:
        self._low, self._high = low, high

    def ids(self, rng: random.Random, num_tokens: int) -> list[int]:
        return [rng.randrange(self._low, self._high) for _ in range(num_tokens)]

    def render(self, ids: Sequence[int]) -> Prompt:
        return list(ids)


class Words:
    """Random words that are one token each, sent as text that encodes to them again, within a token or two."""

    def __init__(self, tokenizer_dir: Path) -> None:
        """Raises BenchmarkError when there is no `tokenizer_dir`/tokenizer.json, or it has no such words."""
        from tokenizers import Tokenizer

        path = tokenizer_dir / "tokenizer.json"
        if not path.is_file():
            raise BenchmarkError(f"there is no {path}")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._words = sorted(index for token, index in self._tokenizer.get_vocab().items() if _is_word(token))
        if not self._words:
            raise BenchmarkError(f"no plain words in the vocabulary of {tokenizer_dir}")

    def ids(self, rng: random.Random, num_tokens: int) -> list[int]:
        return rng.choices(self._words, k=num_tokens)

    def render(self, ids: Sequence[int]) -> Prompt:
        return str(self._tokenizer.decode(list(ids)))


def _is_word(token: str) -> bool:
    """Byte-level vocabularies write a leading space as U+0120."""
    word = token[1:]
    return token[:1] == "\u0120" and 3 <= len(word) <= 8 and word.isascii() and word.isalpha() and word.islower()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send."""

    kind: str
    """"steady", "long" or "req": requests of a kind are summarised together."""
    prompt: Prompt
    num_prompt_tokens: int
    max_tokens: int
    start_at: float = 0.0
    """Seconds after the run began; not looked at when the workload has a concurrency."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how they are sent."""

    name: str
    requests: list[PlannedRequest]
    concurrency: int | None = None
    """None: each request at its own time. Else: so many at once, in order."""
    background: Callable[[], list[PlannedRequest]] | None = None
    """Streams kept open, each followed by another, until the last of `requests` has its first token.

    Until then and not longer, so that a fast server is disturbed as often as a slow one. Called once
    for each round, so that no round repeats a prompt.
    """


def build(name: str, prompts: PromptSource, seed: int) -> Workload:
    """Raises ValueError for a name that is not in NAMES."""
    rng = random.Random(f"{name} {seed}")  # workloads with one seed share no beginning that a cache could hold

    def request(kind: str, num_tokens: int, max_tokens: int, start_at: float = 0.0) -> PlannedRequest:
        return _planned(kind, prompts, prompts.ids(rng, num_tokens), max_tokens, start_at)

    if name == "W1":
        return Workload(
            name,
            [request("long", LONG_PROMPT_TOKENS, 8, 1.0 + 2.0 * index) for index in range(5)],
            # Longer than the run on most servers, and within a context of 2,048.
            background=lambda: [request("steady", 64, 1000) for _ in range(STEADY_STREAMS)],
        )
    if name == "W1b":
        return Workload(name, [request("steady", 64, 200) for _ in range(STEADY_STREAMS)])
    if name == "W2":
        lengths = random.Random(name)  # the same lengths in every run
        return Workload(name, [request("req", lengths.randint(32, 256), 64) for _ in range(64)], concurrency=16)
    if name == "W3":
        prefix = prompts.ids(rng, 1024)
        return Workload(
            name,
            [_planned("req", prompts, prefix + prompts.ids(rng, 32), 32) for _ in range(24)],
            concurrency=8,
        )
    if name == "W4":
        return Workload(name, [request("req", 32, 200)], concurrency=1)
    raise ValueError(f"no workload is called {name!r}; there are {', '.join(NAMES)}")


def warm_up(prompts: PromptSource, seed: int) -> Workload:
    """A few short requests and a long one, so that the first measured request meets a warm server."""
    rng = random.Random(seed)
    sizes = [(40, 16)] * 4 + [(1200, 4)]
    return Workload("warm-up", [_planned("warm", prompts, prompts.ids(rng, n), out) for n, out in sizes], 4)


def _planned(
    kind: str, prompts: PromptSource, ids: list[int], max_tokens: int, start_at: float = 0.0
) -> PlannedRequest:
    return PlannedRequest(kind, prompts.render(ids), len(ids), max_tokens, start_at)
