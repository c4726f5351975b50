"""Engines that die by script, behind a handle as a front end holds one: real senders of tokens, no Ray."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from link_peers import until
from ray.exceptions import ActorDiedError

from cluster.links.messages import GenerateRequest, GenerateSummary
from cluster.links.token_sender import TokenSender
from scheduler.plan import PromptLogprobs, RequestOutput, TokenLogprobs

Kind = Literal["run", "die", "lost", "abort", "silent", "cut", "condemned", "unavailable", "deaf", "busy"]
"""How an attempt ends: `die` with the process, `lost` and `abort` in order, `silent` suspended, `cut` with a call that
resolves and a link that never brings the tokens, `condemned` so and with an error; and before its admission
`unavailable` at once, `deaf` never answered, `busy` refused for a queue.
"""
BEFORE_ADMISSION = ("unavailable", "deaf", "busy")


@dataclass(frozen=True)
class Fate:
    kind: Kind = "run"
    tokens: int = 0
    """Tokens that this attempt gives before its end."""


def token_at(position: int) -> int:
    """The one right token after `position` others."""
    return (position * 7919 + 13) % 1000


def undisturbed(max_tokens: int) -> list[int]:
    return [token_at(position) for position in range(max_tokens)]


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -token_id / 1000, [(token_id, -token_id / 1000)])


class Call:
    """What a handle's call returns: to be awaited, and cancelled."""

    def __init__(self) -> None:
        self.future: asyncio.Future[GenerateSummary] = asyncio.get_running_loop().create_future()
        self.work: asyncio.Task[None] | None = None
        self.cancelled = False

    def __await__(self) -> Any:
        return self.future.__await__()

    def cancel(self) -> None:
        self.cancelled = True
        if self.work is not None:
            self.work.cancel()
        if not self.future.done():
            self.future.cancel()

    def resolve(self, summary: GenerateSummary) -> None:
        if not self.future.done():
            self.future.set_result(summary)


@dataclass
class FailingEngines:
    """Each call meets an engine of its own with the next fate; after the last one they all run to the end."""

    fates: Iterable[Fate] = ()
    pause: Callable[[], Any] = lambda: asyncio.sleep(0)
    num_cached: Iterable[int] = ()
    requests: list[GenerateRequest] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    finishes: list[tuple[str, str]] = field(default_factory=list)
    """(request id, reason) that engines were told."""

    def __post_init__(self) -> None:
        self._fates, self._cached = iter(self.fates), iter(self.num_cached)
        self.generate = SimpleNamespace(remote=self._generate)
        self._senders: list[TokenSender] = []

    def _generate(self, request: GenerateRequest) -> Call:
        fate, call = next(self._fates, Fate()), Call()
        self.requests.append(request)
        self.calls.append(call)
        if fate.kind == "unavailable":
            call.future.set_exception(ActorDiedError())
        elif fate.kind != "deaf":
            call.work = asyncio.ensure_future(self._run(request, fate, call, next(self._cached, 0)))
        return call

    async def _run(self, request: GenerateRequest, fate: Fate, call: Call, num_cached: int) -> None:
        told = asyncio.Event()

        def finish(request_id: str, reason: str) -> None:
            self.finishes.append((request_id, reason))
            told.set()

        sender = TokenSender(f"engine-{len(self._senders)}", finish, 20.0)
        self._senders.append(sender)
        sender.start()
        sender.open(request.request_id, request.reply_to, call.resolve)
        if fate.kind == "busy":
            sender.refuse(request.request_id, "the queue is too long", None, 3.0)
            return
        sender.admit(request.request_id)
        if fate.tokens % 2:  # then the link is there before the first token is
            await until(lambda: any(frontend._resumed for frontend in sender._frontends.values()))
        sampling, first = request.sampling_params, len(request.output_token_ids)
        if sampling.num_prompt_logprobs is not None:
            for position in range(1, len(request.prompt_token_ids)):
                entry = logprobs_of(request.prompt_token_ids[position])
                self._say(sender, request, [], None, num_cached, PromptLogprobs(position, [entry]))
        last = sampling.max_tokens if fate.kind == "run" else min(first + fate.tokens, sampling.max_tokens - 1)
        for position in range(first, last):
            await self.pause()
            if told.is_set():
                self._say(sender, request, [], "abort", num_cached)
                return
            reason = "length" if position + 1 == sampling.max_tokens else None
            self._say(sender, request, [token_at(position)], reason, num_cached)
        if fate.kind in ("lost", "abort"):
            self._say(sender, request, [], fate.kind, num_cached)
        elif fate.kind != "run":
            if fate.tokens % 2:  # what was said arrives, or perhaps not all of it
                await asyncio.sleep(0.02)
            self._stop(sender, suspend=fate.kind == "silent")
            if fate.kind == "die":
                call.future.set_exception(ActorDiedError())
            elif fate.kind == "cut":
                call.resolve(GenerateSummary("length", sampling.max_tokens - first))
            elif fate.kind == "condemned":
                call.resolve(GenerateSummary("error", fate.tokens))

    def _say(
        self,
        sender: TokenSender,
        request: GenerateRequest,
        token_ids: list[int],
        reason: str | None,
        num_cached: int,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        wanted = request.sampling_params.num_logprobs is not None
        logprobs = [logprobs_of(token_id) for token_id in token_ids] if wanted else None
        sender.publish([RequestOutput(request.request_id, token_ids, reason, num_cached, logprobs, prompt_logprobs)])

    def _stop(self, sender: TokenSender, *, suspend: bool) -> None:
        """It says nothing more; a suspended one keeps its sockets."""
        for task in list(sender._tasks):
            task.cancel()
        if not suspend:
            for frontend in sender._frontends.values():
                frontend.close()
