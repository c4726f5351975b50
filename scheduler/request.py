"""One request: its tokens, one progress integer, one status. No phase."""

import enum
from collections.abc import Iterator, Sequence
from typing import overload

from scheduler.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """What a request's state means; how far it is, is `num_computed_tokens` alone."""

    WAITING = "waiting"
    WAITING_FOR_FSM = "waiting for its grammar"
    """Its grammar is still compiling: it keeps its place in the queue and competes for nothing."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED"))


class RequestRefused(ValueError):
    """A request can never be served. The message names the limit, `param` the field (or None)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TokenView(Sequence[int]):
    """Read-only view of a list of token ids that its owner keeps extending. A slice is a copy."""

    __slots__ = ("_token_ids",)

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._token_ids[index]

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._token_ids == list(other)

    def __repr__(self) -> str:
        return f"TokenView({self._token_ids})"


class Request:
    """A sequence of tokens (prompt, then output) and how many of them are computed.

    The scheduler owns every field but the token lists, which only `append_output_token_ids` extends.
    """

    __slots__ = (
        "_all_token_ids",
        "_output_token_ids",
        "all_token_ids",
        "arrival_index",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "has_grammar",
        "is_long_prefill",
        "lora_id",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_tokens",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_token_ids",
        "was_resubmitted",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        arrival_time: float = 0.0,
        priority: int = 0,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        has_grammar: bool = False,
        output_token_ids: Sequence[int] = (),
        resubmitted: bool = False,
    ) -> None:
        """`output_token_ids`: generated and delivered before, elsewhere. They count as output.

        `resubmitted`: it was taken elsewhere and lost there, if only before its first token.
        """
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time  # seconds, by any one clock
        self.arrival_index = 0  # order of add_request: settles equal arrival times
        self.priority = priority  # smaller goes first
        self.lora_id = lora_id
        self.cache_salt = cache_salt
        self.has_grammar = has_grammar
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids)
        self.max_tokens = sampling_params.max_tokens  # clipped by the scheduler to what the model length leaves

        self.prompt_token_ids: Sequence[int] = tuple(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self._output_token_ids: list[int] = []
        self._all_token_ids: list[int] = list(prompt_token_ids)
        self.output_token_ids = TokenView(self._output_token_ids)
        self.all_token_ids = TokenView(self._all_token_ids)
        self.num_tokens = self.num_prompt_tokens  # known tokens, prompt and output: asked several times a step
        self.append_output_token_ids(output_token_ids)
        self.was_resubmitted = resubmitted or bool(output_token_ids)  # goes ahead of new ones

        self.status = RequestStatus.WAITING_FOR_FSM if has_grammar else RequestStatus.WAITING
        self.num_computed_tokens = 0  # tokens whose KV is computed once the plans in flight have run
        self.num_output_placeholders = 0  # sampled tokens that plans in flight will bring
        self.spec_token_ids: list[int] = []  # drafts for the next step
        self.num_preemptions = 0  # also tells this stay in RUNNING from earlier ones
        self.num_cached_tokens = 0  # prefix-cache hit of the first admission, in the prompt
        self.num_lost_tokens = 0  # computed before the last preemption
        self.is_long_prefill = False  # owed more than the threshold when admitted
        self.block_hashes: list[bytes] = []  # of its leading full blocks, computed when first needed
        self.num_published_blocks = 0  # leading blocks of this stay already offered to the prefix cache

    @property
    def max_num_tokens(self) -> int:
        """Length at which it ends, prompt and output together."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_decoding(self) -> bool:
        """It owes at most one token. Everything else is a chunk, recomputed output included."""
        return self.num_computed_tokens >= self.num_tokens + self.num_output_placeholders - 1

    @property
    def is_partial(self) -> bool:
        """Known tokens are not all computed."""
        return self.num_computed_tokens < self.num_tokens

    @property
    def order_key(self) -> tuple[int, bool, float, int]:
        """Its place under the priority policy: smaller goes first."""
        return (self.priority, not self.was_resubmitted, self.arrival_time, self.arrival_index)

    def append_output_token_ids(self, token_ids: Sequence[int]) -> None:
        """The only way to add tokens: keeps output and the whole sequence in step."""
        self._output_token_ids.extend(token_ids)
        self._all_token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens}"
            f" of {self.num_tokens}, placeholders {self.num_output_placeholders})"
        )
