"""Both ends of the token link on one loop: order, lost links, slow and silent peers, orphans."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from link_peers import DEADLINE, HOST, Ends, Listening, until

from cluster.errors import EngineError, RequestError
from cluster.links import token_receiver, token_sender
from cluster.links.messages import Admission, Finish, GenerateSummary, LinkAddress, Resume, TokenBatch
from cluster.links.request_tokens import RequestTokens
from cluster.links.token_link import decode_from_engine, decode_from_frontend, encode_message
from cluster.links.token_receiver import TokenChannel, TokenReceiver
from cluster.links.token_sender import TokenSender
from scheduler.plan import PromptLogprobs, RequestOutput, TokenLogprobs
from workers.link import LinkError, connect


def logprobs(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, [(token_id, -0.5)]) for token_id in token_ids]


@pytest.mark.parametrize("message", [Admission("r"), Admission("r", "too long", "prompt"), TokenBatch(
    [
        RequestOutput("r", [1, 2], None, 3, logprobs(1, 2)),
        RequestOutput("s", [], "error", 0, None, PromptLogprobs(1, logprobs(7)), "NaN"),
    ]
)])  # fmt: skip
def test_messages_of_an_engine(message: Admission | TokenBatch) -> None:
    kind, payload = encode_message(message)
    assert decode_from_engine(kind, payload) == message
    with pytest.raises(LinkError, match="not one that may come from this side"):
        decode_from_frontend(kind, payload)
    with pytest.raises(LinkError, match="cannot be read"):
        decode_from_engine(kind, payload[:-1])


@pytest.mark.parametrize("message", [Resume({"r": -1, "s": 4}), Finish("r", "stop")])
def test_messages_of_a_front_end(message: Resume | Finish) -> None:
    kind, payload = encode_message(message)
    assert decode_from_frontend(kind, payload) == message
    with pytest.raises(LinkError, match="not one that may come from this side"):
        decode_from_engine(kind, payload)


def test_tokens_since() -> None:
    ends: list[GenerateSummary] = []
    tokens = RequestTokens("r", ends.append)
    prompt = [PromptLogprobs(1, logprobs(8)), PromptLogprobs(2, logprobs(9))]
    tokens.append(RequestOutput("r", [], num_cached_tokens=2, prompt_logprobs=prompt[0]))
    tokens.append(RequestOutput("r", [5], logprobs=logprobs(5), prompt_logprobs=prompt[1]))
    assert [output.prompt_logprobs for output in tokens.since(0)] == [*prompt, None]
    tokens.append(RequestOutput("r", [6, 7], "length", logprobs=logprobs(6, 7)))
    assert ends == [GenerateSummary("length", 3)]
    assert tokens.since(0)[-1] == RequestOutput("r", [5, 6, 7], "length", 2, logprobs(5, 6, 7))
    assert tokens.since(1) == [RequestOutput("r", [6, 7], "length", 2, logprobs(6, 7))]
    assert tokens.since(3) == [RequestOutput("r", [], "length", 2)]


class FakeEngine:
    """The sender of one engine, and what its engine was asked to finish."""

    def __init__(self, name: str, orphan_seconds: float = DEADLINE, max_buffered: int = 1 << 20) -> None:
        self.finished: list[tuple[str, str]] = []
        self.summaries: dict[str, GenerateSummary] = {}
        self.sender = TokenSender(name, self._finish, orphan_seconds, max_buffered)
        self.sender.start()

    def _finish(self, request_id: str, reason: str) -> None:
        self.finished.append((request_id, reason))

    def open(self, request_id: str, address: LinkAddress) -> None:
        self.sender.open(request_id, address, lambda summary: self.summaries.__setitem__(request_id, summary))

    def take(self, request_id: str, address: LinkAddress) -> None:
        self.open(request_id, address)
        self.sender.admit(request_id)

    def say(self, request_id: str, token_ids: Sequence[int], finish_reason: str | None = None) -> None:
        self.sender.publish([RequestOutput(request_id, list(token_ids), finish_reason)])


@asynccontextmanager
async def receiving(silence_seconds: float = DEADLINE) -> AsyncIterator[TokenReceiver]:
    receiver = TokenReceiver(silence_seconds)
    await receiver.start(HOST)
    yield receiver
    await receiver.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def drop_links(receiver: TokenReceiver) -> None:
    """As if the network had cut them."""
    for link in list(receiver._listener.links):
        link.abort()


async def read_all(channel: TokenChannel) -> tuple[list[int], RequestOutput]:
    token_ids: list[int] = []
    async with asyncio.timeout(DEADLINE):
        while True:
            output = await channel.read()
            token_ids += output.new_token_ids
            if output.finish_reason is not None:
                return token_ids, output


async def test_admission_tokens_and_end() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1")
        channels = {name: receiver.register(name) for name in ("a", "b")}
        for name in channels:
            engine.take(name, receiver.address)
        for channel in channels.values():
            await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
            assert channel.engine_id == "engine-1"
        engine.sender.publish([RequestOutput("a", [1]), RequestOutput("b", [2])])
        engine.sender.publish([RequestOutput("a", [3], "stop"), RequestOutput("b", [4], "length")])
        assert (await read_all(channels["a"]))[0] == [1, 3]
        assert (await read_all(channels["b"]))[0] == [2, 4]
        assert engine.summaries == {"a": GenerateSummary("stop", 2), "b": GenerateSummary("length", 2)}
        assert engine.finished == []


async def test_refusal_names_the_field_and_ends_the_request() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1")
        channel = receiver.register("a")
        engine.open("a", receiver.address)
        engine.sender.refuse("a", "the prompt has 99 tokens", "prompt")
        with pytest.raises(RequestError, match="the prompt has 99 tokens") as error:
            await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        assert error.value.param == "prompt"
        assert engine.summaries == {"a": GenerateSummary("error", 0)}


async def test_lost_link_is_redialled_and_nothing_is_lost_or_doubled() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1")
        channel = receiver.register("a")
        engine.take("a", receiver.address)
        await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        for cut in range(3):
            engine.say("a", [10 * cut])
            await until(lambda cut=cut: channel.num_tokens == 3 * cut + 1)
            drop_links(receiver)
            engine.say("a", [10 * cut + 1])
            await asyncio.sleep(0)
            engine.say("a", [10 * cut + 2])
            await until(lambda cut=cut: channel.num_tokens == 3 * cut + 3)
        engine.say("a", [], "stop")
        assert (await read_all(channel))[0] == [0, 1, 2, 10, 11, 12, 20, 21, 22]


async def test_end_that_was_lost_with_the_link_is_said_again() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1")
        channel = receiver.register("a")
        engine.take("a", receiver.address)
        await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        drop_links(receiver)
        engine.say("a", [1, 2], "length")
        assert (await read_all(channel))[0] == [1, 2]


async def test_finish_reaches_the_engine() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1")
        channel = receiver.register("a")
        assert not receiver.finish(receiver.register("not taken yet"), "abort")
        engine.take("a", receiver.address)
        await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        engine.say("a", [1])
        await until(lambda: channel.num_tokens == 1)
        assert receiver.finish(channel, "stop")
        engine.say("a", [2])
        assert await read_all(channel) == ([], RequestOutput("a", [], "stop"))
        await until(lambda: engine.finished)
        assert engine.finished == [("a", "stop")]


async def test_finish_without_a_link_is_told_after_the_redial() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1")
        channel = receiver.register("a")
        engine.take("a", receiver.address)
        await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        drop_links(receiver)
        assert receiver.finish(channel, "stop")
        await until(lambda: engine.finished)
        assert engine.finished == [("a", "stop")]


async def test_tokens_that_nobody_waits_for_are_answered_with_an_abort() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1")
        engine.take("forgotten", receiver.address)
        await until(lambda: engine.finished)
        assert engine.finished[0] == ("forgotten", "abort")


async def test_engines_do_not_mix() -> None:
    async with receiving() as receiver:
        engines = [FakeEngine("engine-1"), FakeEngine("engine-2")]
        channels = [receiver.register("a"), receiver.register("b")]
        for engine, name in zip(engines, ("a", "b"), strict=True):
            engine.take(name, receiver.address)
        for channel in channels:
            await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        drop_links(receiver)
        for number, (engine, name) in enumerate(zip(engines, ("a", "b"), strict=True)):
            engine.say(name, [number], "stop")
        assert [(await read_all(channel))[0] for channel in channels] == [[0], [1]]
        assert [channel.engine_id for channel in channels] == ["engine-1", "engine-2"]


async def test_silent_engine_is_given_up() -> None:
    """As a suspended process: its socket stays open."""
    async with receiving(silence_seconds=0.5) as receiver:
        ends, address = Ends(), receiver.address
        link = await connect(HOST, address.port, address.token, "engine-9", ends.on_message, ends.on_close, DEADLINE)
        channel = receiver.register("a")
        link.send(*encode_message(Admission("a")))
        link.send(*encode_message(TokenBatch([RequestOutput("a", [1])])))
        assert (await asyncio.wait_for(channel.read(), DEADLINE)).new_token_ids == [1]
        with pytest.raises(EngineError, match=r"nothing was heard of engine-9 for 0\.5 s"):
            await asyncio.wait_for(channel.read(), DEADLINE)
        assert not receiver.finish(channel, "abort")


async def test_heartbeats_keep_a_quiet_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for end in (token_sender, token_receiver):
        monkeypatch.setattr(end, "HEARTBEAT_SECONDS", 0.05)
    async with receiving(silence_seconds=0.4) as receiver:
        engine = FakeEngine("engine-1")
        channel = receiver.register("a")
        engine.take("a", receiver.address)
        await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        await asyncio.sleep(1.0)
        engine.say("a", [1], "stop")
        assert (await read_all(channel))[0] == [1]


async def test_requests_of_a_front_end_that_is_gone_are_aborted() -> None:
    async with receiving() as receiver:
        engine = FakeEngine("engine-1", orphan_seconds=0.5)
        channel = receiver.register("a")
        engine.take("a", receiver.address)
        await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        address = receiver.address
        await receiver.close()
        await until(lambda: engine.finished)
        assert engine.finished == [("a", "abort")]
        assert engine.summaries == {"a": GenerateSummary("abort", 0)}
        engine.say("a", [1])  # too late, and no harm
        engine.take("b", address)
        await until(lambda: len(engine.finished) == 2)
        assert engine.finished[1] == ("b", "abort")


async def test_front_end_that_does_not_read_delays_nobody() -> None:
    """Its link is dropped and dialled anew; the other front end gets every token meanwhile."""
    async with receiving() as receiver, Listening() as stuck:
        engine = FakeEngine("engine-1", max_buffered=100_000)
        channel = receiver.register("a")
        listener = stuck.listener
        engine.take("a", receiver.address)
        engine.take("stuck", LinkAddress(listener.host, listener.port, listener.token))
        await until(lambda: stuck.opened)
        stuck.opened[0].send(*encode_message(Resume({})))
        await until(lambda: stuck.messages)
        stuck.opened[0]._transport.pause_reading()  # type: ignore[union-attr]
        await asyncio.wait_for(channel.wait_admitted(), DEADLINE)
        num_steps = 0
        while len(stuck.opened) == 1:  # until it is dropped and dialled again
            engine.sender.publish([RequestOutput("a", [num_steps]), RequestOutput("stuck", [1] * 20_000)])
            num_steps += 1
            await until(lambda num_steps=num_steps: channel.num_tokens == num_steps)
        assert num_steps > 3
        engine.say("a", [], "stop")
        assert (await read_all(channel))[0] == list(range(num_steps))
