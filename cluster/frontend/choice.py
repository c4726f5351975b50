"""One choice of an answer: tokens in, text and log-probabilities out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import EngineError, RequestFailed
from cluster.frontend.detokenizer import Detokenizer
from cluster.frontend.sampling_fields import StopRules
from cluster.frontend.stop_strings import StopStrings
from cluster.frontend.token_table import TokenTable
from scheduler.plan import RequestOutput, TokenLogprobs
from scheduler.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token of the answer. `logprobs` is None for a prompt's first token, which nothing predicted."""

    token_id: int
    text_offset: int
    """Where its text begins in the choice's text, in characters."""
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class ChoiceDelta:
    """What one step adds to a choice. All deltas of a choice joined are its result."""

    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    """Tokens whose text is (partly) kept; empty unless log-probabilities were asked for."""
    finish_reason: str | None = None
    """"stop" or "length", on the last delta only."""


class Choice:
    """Follows one request from its prompt to its end. Feed it every output, until it is finished."""

    def __init__(
        self,
        table: TokenTable,
        sampling: SamplingParams,
        stop: StopRules,
        prompt_token_ids: Sequence[int],
        *,
        echo: bool = False,
        continues_prompt: bool = False,
        discards_output: bool = False,
    ) -> None:
        """With `echo` the text begins with the prompt's. With `continues_prompt` the output's leading space
        is kept. With `discards_output` the one token that the engine cannot but generate is not the client's.
        """
        self._sampling = sampling
        self._stop = stop
        self._prompt = prompt_token_ids
        self._echo = echo
        self._discards_output = discards_output
        self._detokenizer = Detokenizer(
            table, skip_special_tokens=stop.skip_special_tokens, starts_text=echo or not continues_prompt
        )
        self._stop_strings = StopStrings(stop.strings, include_match=stop.include_in_output)
        self._num_decoded = 0
        """Characters decoded so far, echo included."""
        self._num_released = 0
        self._entries: list[TokenEntry] = []
        """Not yet sent: their text is still held back."""
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._wants_logprobs = sampling.num_logprobs is not None
        self._echoed = not echo
        self.num_tokens = 0
        """Tokens generated up to the end of the text."""
        self.num_cached_tokens = 0
        self.finished = False

    def start(self) -> ChoiceDelta:
        """The echo of the prompt, unless it must wait for the prompt's log-probabilities."""
        delta = ChoiceDelta()
        if not self._echoed and not self._wants_logprobs:
            self._echo_prompt(delta)
        return delta

    def feed(self, output: RequestOutput) -> ChoiceDelta:
        """One step's output. Raises EngineError when the engine gave the request up."""
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            for position, logprobs in enumerate(output.prompt_logprobs.tokens, output.prompt_logprobs.start):
                self._prompt_logprobs[position] = logprobs
        if output.finish_reason not in (None, "stop", "length"):
            kind = RequestFailed if output.finish_reason == "error" else EngineError
            raise kind(f"the engine ended the request with {output.finish_reason}: {output.error}")
        delta = ChoiceDelta()
        if not self._echoed and (output.new_token_ids or output.finish_reason is not None):
            self._echo_prompt(delta)
        if not self._discards_output:
            self._feed_tokens(output, delta)
        if output.finish_reason is not None and not self.finished:
            self._finish(delta, "length" if self._discards_output else output.finish_reason)
        self._release_entries(delta)
        return delta

    def finish_empty(self) -> ChoiceDelta:
        """The whole of an echo that generates nothing and needs no engine."""
        delta = ChoiceDelta()
        self._echo_prompt(delta)
        self._finish(delta, "length")
        return delta

    @property
    def _armed(self) -> bool:
        return self.num_tokens >= self._sampling.min_tokens

    def _echo_prompt(self, delta: ChoiceDelta) -> None:
        self._echoed = True
        text = []
        for position, token_id in enumerate(self._prompt):
            if self._wants_logprobs:
                logprobs = self._prompt_logprobs.get(position)
                if logprobs is None and position > 0:
                    raise EngineError(f"the engine sent no log-probabilities for prompt position {position}")
                self._entries.append(TokenEntry(token_id, self._num_decoded, logprobs))
            piece = self._detokenizer.feed(token_id)
            self._num_decoded += len(piece)
            text.append(piece)
        self._release_text(delta, "".join(text))

    def _feed_tokens(self, output: RequestOutput, delta: ChoiceDelta) -> None:
        token_ids = output.new_token_ids
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            is_last = output.finish_reason == "stop" and index == len(token_ids) - 1
            if is_last and token_id in self._sampling.stop_token_ids and not self._stop.include_in_output:
                return
            if output.logprobs is not None and self._wants_logprobs:
                self._entries.append(TokenEntry(token_id, self._num_decoded, output.logprobs[index]))
            self._feed_text(delta, self._detokenizer.feed(token_id))
            if self._stop_strings.hit:
                self._end(delta, "stop")
                return

    def _feed_text(self, delta: ChoiceDelta, text: str) -> None:
        self._num_decoded += len(text)
        self._release_text(delta, self._stop_strings.feed(text, armed=self._armed))

    def _finish(self, delta: ChoiceDelta, reason: str) -> None:
        """The engine has ended the request: what was held back is text after all."""
        self._feed_text(delta, self._detokenizer.flush())
        if self._stop_strings.hit:
            self._end(delta, "stop")
            return
        self._release_text(delta, self._stop_strings.flush())
        delta.entries += self._entries
        self._entries = []
        self._end(delta, reason)

    def _end(self, delta: ChoiceDelta, reason: str) -> None:
        self.finished = True
        delta.finish_reason = reason

    def _release_text(self, delta: ChoiceDelta, text: str) -> None:
        delta.text += text
        self._num_released += len(text)

    def _release_entries(self, delta: ChoiceDelta) -> None:
        """Entries whose text has begun to be sent. What a stop string has cut off stays behind."""
        ready = 0
        while ready < len(self._entries) and self._entries[ready].text_offset < self._num_released:
            ready += 1
        delta.entries += self._entries[:ready]
        del self._entries[:ready]
