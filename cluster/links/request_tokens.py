"""What an engine keeps of one request's answer, for a front end whose link may be lost and dialled again."""

from collections.abc import Callable

from cluster.links.messages import Admission, GenerateSummary
from scheduler.plan import PromptLogprobs, RequestOutput, TokenLogprobs

OnEnd = Callable[[GenerateSummary], None]
"""Called once, when the request has ended."""


class RequestTokens:
    """All that was said of one request so far, so that it can be said again after a lost link."""

    def __init__(self, request_id: str, on_end: OnEnd) -> None:
        self.request_id = request_id
        self.admission: Admission | None = None
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._error: str | None = None
        self._on_end = on_end

    def append(self, output: RequestOutput) -> None:
        """Take one step's output; the last one ends the request."""
        self.token_ids += output.new_token_ids
        self._logprobs += output.logprobs or ()
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs.append(output.prompt_logprobs)
        if output.finish_reason is not None:
            self._error = output.error
            self.end(output.finish_reason)

    def end(self, finish_reason: str) -> None:
        """Nothing comes after this."""
        self.finish_reason = finish_reason
        self._on_end(GenerateSummary(finish_reason, len(self.token_ids)))

    def since(self, num_tokens: int) -> list[RequestOutput]:
        """Outputs that bring a reader of `num_tokens` tokens (0 or more) up to now. None lacks its end."""
        outputs = []
        if num_tokens == 0:  # Prompt log-probabilities come before the first token.
            outputs = [self._output([], prompt_logprobs=part) for part in self._prompt_logprobs]
        if num_tokens < len(self.token_ids) or self.finish_reason is not None:
            last = self._output(self.token_ids[num_tokens:])
            last.logprobs = self._logprobs[num_tokens:] or None
            last.finish_reason = self.finish_reason
            last.error = self._error
            outputs.append(last)
        return outputs

    def _output(self, token_ids: list[int], prompt_logprobs: PromptLogprobs | None = None) -> RequestOutput:
        return RequestOutput(
            self.request_id, token_ids, num_cached_tokens=self._num_cached_tokens, prompt_logprobs=prompt_logprobs
        )
