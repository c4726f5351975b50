"""One API request as engine requests: one for each choice of each prompt."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType

from cluster.errors import EngineError, RequestError
from cluster.frontend.choice import Choice, ChoiceDelta
from cluster.frontend.protocol import GenerationOptions
from cluster.frontend.token_table import TokenTable
from cluster.links.engine_client import EngineClient, RequestStream
from scheduler.sampling_params import SamplingParams

_seeds = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one API request. The prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Opens every choice on entry, gives their deltas, and on exit aborts what has not ended.

    Entry raises RequestError or EngineError when any choice is refused; none then runs on.
    """

    def __init__(
        self,
        client: EngineClient,
        table: TokenTable,
        options: GenerationOptions,
        prompts: Sequence[Sequence[int]],
        max_model_len: int,
        *,
        echo: bool = False,
        continues_prompt: bool = False,
        prompt_field: str = "prompt",
    ) -> None:
        """Raises RequestError (param `prompt_field`) when a prompt leaves no room; sends nothing yet."""
        for prompt in prompts:
            _check_room(len(prompt), max_model_len, prompt_field)
        self._client = client
        self._options = options
        self._prompts = prompts
        self._generates = options.limits.max_tokens != 0
        self._needs_engine = self._generates or options.sampling.num_logprobs is not None
        self._sampling = [
            sampling for prompt in prompts for sampling in _choice_params(options, len(prompt), max_model_len, echo)
        ]
        self.choices = [
            Choice(
                table,
                sampling,
                options.stop,
                prompts[index // options.n],
                echo=echo,
                continues_prompt=continues_prompt,
                discards_output=not self._generates,
            )
            for index, sampling in enumerate(self._sampling)
        ]
        self._streams: list[RequestStream] = []
        self._opening: list[asyncio.Future[RequestStream]] = []
        self._interrupted = False

    async def __aenter__(self) -> "Generation":
        if self._needs_engine:
            await self._open_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abort_unfinished()

    def interrupt(self) -> None:
        """End it now, with an EngineError for whoever waits for its opening or its deltas."""
        self._interrupted = True
        for task in self._opening:
            task.cancel()
        self._abort_unfinished()

    def _abort_unfinished(self) -> None:
        for choice, stream in zip(self.choices, self._streams, strict=False):
            if not choice.finished:
                stream.finish("abort")

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """(choice index, delta) as they come; deltas without content are left out.

        Raises EngineError when the engine fails any choice.
        """
        if not self._needs_engine:
            for index, choice in enumerate(self.choices):
                yield index, choice.finish_empty()
            return
        for index, choice in enumerate(self.choices):
            delta = choice.start()
            if delta.text:
                yield index, delta
        merged = self._choice_deltas(0) if len(self.choices) == 1 else self._merged_deltas()
        async with aclosing(merged):
            async for item in merged:
                yield item

    def usage(self) -> Usage:
        """Final once the deltas have ended."""
        n = self._options.n
        groups = [self.choices[first : first + n] for first in range(0, len(self.choices), n)]
        return Usage(
            prompt_tokens=sum(map(len, self._prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            # Later choices of a prompt find in the cache what the first one has just put there.
            cached_tokens=sum(min(choice.num_cached_tokens for choice in group) for group in groups),
        )

    async def _open_all(self) -> None:
        self._opening = [asyncio.ensure_future(self._open(index)) for index in range(len(self.choices))]
        try:
            self._streams = list(await asyncio.gather(*self._opening))
        except BaseException as error:
            for task in self._opening:
                task.cancel()
            for opened in await asyncio.gather(*self._opening, return_exceptions=True):
                if not isinstance(opened, BaseException):
                    opened.finish("abort")
            if self._interrupted and isinstance(error, asyncio.CancelledError):
                raise EngineError("interrupted while it waited for an engine") from None
            raise

    async def _open(self, index: int) -> RequestStream:
        return await self._client.open(
            self._prompts[index // self._options.n],
            self._sampling[index],
            priority=self._options.priority,
            cache_salt=self._options.cache_salt,
        )

    async def _choice_deltas(self, index: int) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        choice, stream = self.choices[index], self._streams[index]
        async for output in stream:
            delta = choice.feed(output)
            if choice.finished and output.finish_reason is None:
                stream.finish("stop")
            if delta.text or delta.entries or delta.finish_reason is not None:
                yield index, delta
            if choice.finished:
                return
        raise EngineError("the engine's stream ended without a finish reason")

    async def _merged_deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        queue: asyncio.Queue[tuple[int, ChoiceDelta] | BaseException] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async for item in self._choice_deltas(index):
                    queue.put_nowait(item)
            except Exception as error:
                queue.put_nowait(error)

        pumps = [asyncio.ensure_future(pump(index)) for index in range(len(self.choices))]
        try:
            num_open = len(pumps)
            while num_open:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                num_open -= item[1].finish_reason is not None
                yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


def _check_room(num_prompt_tokens: int, max_model_len: int, field: str) -> None:
    if num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"{field}: the prompt has {num_prompt_tokens} tokens; it must have fewer than the model's maximum length "
            f"of {max_model_len} tokens, to leave room for an answer",
            param=field,
            code="context_length_exceeded",
        )


def _choice_params(
    options: GenerationOptions, num_prompt_tokens: int, max_model_len: int, echo: bool
) -> list[SamplingParams]:
    """The final parameters of one prompt's n choices."""
    room = max_model_len - num_prompt_tokens
    asked = options.limits.max_tokens
    max_tokens = room if asked is None else max(1, min(asked, room))
    seed = _seeds.getrandbits(64) if options.seed is None else options.seed
    return [
        replace(
            options.sampling,
            max_tokens=max_tokens,
            min_tokens=min(options.limits.min_tokens, max_tokens),
            seed=(seed + index) % 2**64,
            num_prompt_logprobs=options.sampling.num_logprobs if echo else None,
        )
        for index in range(options.n)
    ]
