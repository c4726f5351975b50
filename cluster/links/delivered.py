"""What the reader of one stream has got: all that another engine needs to go on with it."""

import time
import uuid
from dataclasses import replace

from cluster.links.messages import GenerateRequest
from scheduler.plan import RequestOutput


class Delivered:
    """Follows a request over all the engines that have had it."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._token_ids = list(request.output_token_ids)
        self._delivered_at = request.delivered_at
        self._num_cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def take(self, output: RequestOutput) -> RequestOutput:
        """The reader gets this; what the first engine found in its cache is what is told to the end."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        output.num_cached_tokens = self._num_cached_tokens
        if output.new_token_ids:
            self._token_ids += output.new_token_ids
            now = time.time()
            self._delivered_at = (self._delivered_at[0] if self._delivered_at else now, now)
        return output

    def next_request(self, *, was_admitted: bool) -> GenerateRequest:
        """The rest of it, under an id that no engine has seen. `was_admitted`: an engine had taken it."""
        sampling = self._request.sampling_params
        if self._token_ids:  # The prompt's log-probabilities came before the first token.
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(
            self._request,
            request_id=uuid.uuid4().hex,
            sampling_params=sampling,
            resubmitted=was_admitted,
            output_token_ids=list(self._token_ids),
            delivered_at=self._delivered_at,
        )

    def finish_reason(self) -> str | None:
        """Why nothing can come after these tokens, where only the word of it was lost."""
        sampling = self._request.sampling_params
        if self._token_ids and self._token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self._token_ids) >= sampling.max_tokens else None
