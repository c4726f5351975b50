"""A tiny tokenizer and a scripted engine for the tests of the HTTP API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cluster.errors import EngineError, RequestError
from cluster.frontend.api import build_app
from cluster.frontend.generation_defaults import GenerationDefaults
from cluster.frontend.health import Health
from cluster.frontend.settings import FrontendSettings
from cluster.frontend.tokenizer import Tokenizer
from cluster.links.engine_client import RequestStream
from cluster.metrics.frontend import FrontendMetrics
from scheduler.plan import PromptLogprobs, RequestOutput, TokenLogprobs
from scheduler.sampling_params import SamplingParams
from workers.config import ModelLimits

MODEL = "tiny"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
CORPUS = [
    "The capital of France is Paris.",
    "Streams stay steady while long prompts arrive in chunks.",
    "user assistant system hello world, how are you today?",
    "naïve café, 你好，世界! 😀 emoji שלום",
]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message.content == 'break me' %}{{ 1 / 0 }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if style is defined %}[{{ style }}]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_backend() -> BackendTokenizer:
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", " été"])
    return backend


def sentencepiece_backend() -> BackendTokenizer:
    """As Llama 2's: a dummy space before the text, and bytes for what the vocabulary lacks."""
    backend = BackendTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS[:3], trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]  # byte tokens belong to the model, they are not special
    return BackendTokenizer.from_str(json.dumps(spec))


def make_tokenizer() -> Tokenizer:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return Tokenizer(tokenizer)


TOKENIZER = make_tokenizer()
BACKEND = TOKENIZER._backend
VOCAB = BACKEND.get_vocab_size() + 5
"""The head has a few padding rows."""
EOS = BACKEND.token_to_id("<|im_end|>")
DEFAULTS = GenerationDefaults(eos_token_ids=(EOS,))
MAX_MODEL_LEN = 128


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def split_bytes(text: str) -> list[int]:
    """One token a byte, so that every character is split as far as it can be."""
    by_piece = {TOKENIZER.table.piece(token_id): token_id for token_id in range(VOCAB)}
    return [by_piece[bytes([byte])] for byte in text.encode()]


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token's own best candidate is never the token itself when its id is odd."""
    top = [((token_id + token_id % 2 + rank) % VOCAB, -0.5 - rank) for rank in range(count)]
    own = dict(top).get(token_id, -30.0)
    return TokenLogprobs(token_id, own, top)


@dataclass
class FakeStream:
    """Outputs of one request, one token a step, as the scheduler would give them."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    script: list[int]
    delay: Callable[[], Any]
    fault_at: int | None = None
    fault: Exception | None = None
    num_cached: int = 0
    finishes: list[str] = field(default_factory=list)
    ended: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, reason: str) -> None:
        self.finishes.append(reason)
        self.finished.set()

    async def _step(self) -> None:
        """Waits for the step, or for the request to be finished from outside."""
        waits = [asyncio.ensure_future(self.delay()), asyncio.ensure_future(self.finished.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
        finally:
            for wait in waits:
                wait.cancel()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        if self.params.num_prompt_logprobs is not None:
            count = self.params.num_prompt_logprobs
            entries = [fake_logprobs(token_id, count) for token_id in self.prompt[1:]]
            yield self._output([], prompt_logprobs=PromptLogprobs(1, entries[:2]))
            if len(self.prompt) > 2:  # the second message repeats a position, as after a preemption
                yield self._output([], prompt_logprobs=PromptLogprobs(2, entries[1:]))
        for count, token_id in enumerate(self.script, 1):
            await self._step()
            if self.finished.is_set():
                yield self._output([], self.finishes[0])
                return
            if count == self.fault_at:
                if self.fault is not None:
                    raise self.fault
                self.ended = True
                yield self._output([], "abort")
                return
            stops = token_id in self.params.stop_token_ids and count > self.params.min_tokens
            reason = "stop" if stops else "length" if count == self.params.max_tokens else None
            self.ended = reason is not None
            yield self._output([token_id], reason)
            if self.ended:
                return

    def _output(
        self, token_ids: list[int], reason: str | None = None, prompt_logprobs: PromptLogprobs | None = None
    ) -> RequestOutput:
        count = self.params.num_logprobs
        return RequestOutput(
            self.request_id,
            token_ids,
            reason,
            self.num_cached,
            None if count is None else [fake_logprobs(token_id, count) for token_id in token_ids],
            prompt_logprobs,
        )


class FakeEngineClient:
    """Follows `script` (token ids, repeated for ever), or for each choice in turn one of `scripts`."""

    def __init__(self, script: Sequence[int] = (), *, scripts: Iterable[Sequence[int]] = ()) -> None:
        self.script = list(script) or ids_of("Hello world, how are you today?")
        self.scripts = [list(item) for item in scripts]
        self.ready = True
        self.live = True
        self.refuse: Callable[[int], Exception | None] = lambda index: None
        self.fault_at: int | None = None
        self.fault: Exception | None = None
        self.delay: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.open_delay: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.cached: Callable[[int], int] = lambda index: 0
        self.streams: list[FakeStream] = []
        self.calls: list[dict[str, Any]] = []

    async def limits(self, *, renew: bool = True) -> ModelLimits:
        if not self.ready:
            raise EngineError("no engine is ready: /secret/path")
        return ModelLimits(num_blocks=64, block_size=16, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB)

    async def open(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        index = len(self.calls)
        self.calls.append({"prompt": list(prompt_token_ids), "priority": priority, "cache_salt": cache_salt})
        await self.open_delay()
        error = self.refuse(index)
        if error is not None:
            raise error
        script = self.scripts[index % len(self.scripts)] if self.scripts else self.script
        repeated = [script[position % len(script)] for position in range(MAX_MODEL_LEN)]
        stream = FakeStream(
            f"r{index}", list(prompt_token_ids), sampling_params, repeated, self.delay, self.fault_at, self.fault
        )
        stream.num_cached = self.cached(index)
        self.streams.append(stream)
        return stream

    @property
    def params(self) -> list[SamplingParams]:
        return [stream.params for stream in self.streams]

    def left_running(self) -> list[FakeStream]:
        """Streams that neither ended nor were finished."""
        return [stream for stream in self.streams if not stream.ended and not stream.finishes]


async def fake_metrics() -> tuple[bytes, str]:
    return b"chunkserve:engine_up 1\n", "text/plain; version=0.0.4"


def make_app(client: FakeEngineClient, metrics: FrontendMetrics | None = None, **settings: Any) -> FastAPI:
    async def check_health() -> Health:
        return Health(client.ready, client.live, "ready" if client.ready else "loading weights")

    return build_app(
        FrontendSettings("/nowhere", MODEL, **settings),
        TOKENIZER,
        DEFAULTS,
        client,
        fake_metrics,
        check_health,
        metrics or FrontendMetrics(),
    )


def http_client(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, **options)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def refusal(message: str, param: str) -> RequestError:
    return RequestError(message, param)


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that must end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def save_model_files(path: Path, **files: dict[str, Any]) -> None:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
