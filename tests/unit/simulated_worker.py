"""A worker without a model: it mirrors requests from plans alone and remembers what each KV slot holds.

A slot holds the hash of everything its content depends on: adapter, salt and all tokens up to and including
its own. Reading is checking: before and after a step, every position a scheduled request has computed must
hold that request's own prefix. The next token is a function of all tokens before it.
"""

import random
from dataclasses import dataclass, field

from scheduler.plan import NewRequest, StepPlan, StepResult
from scheduler.sampling_params import SamplingParams

VOCABULARY = 6


def next_token(tokens: list[int], num_prompt_tokens: int, params: SamplingParams) -> int:
    """The token this "model" gives after `tokens`; stop tokens are masked until `min_tokens` were generated."""
    token = hash(tuple(tokens)) % VOCABULARY
    if len(tokens) - num_prompt_tokens < params.min_tokens:
        while token in params.stop_token_ids:
            token = (token + 1) % VOCABULARY
    return token


def expected_output(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """What a request must give, and why it ends, whatever runs beside it."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, len(prompt), params))
        if tokens[-1] in params.stop_token_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) - len(prompt) == params.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt) :], "length"


@dataclass
class MirroredRequest:
    new: NewRequest
    salt: str | None
    tokens: list[int]
    blocks: list[int]
    computed: int
    contents: list[int] = field(default_factory=list)

    @property
    def is_partial(self) -> bool:
        """Tokens known when it was admitted are still to compute."""
        return self.computed < len(self.new.token_ids)

    def contents_with(self, drafts: list[int]) -> list[int]:
        """What the slot of each position must hold; extends the stored list to all known tokens."""
        for token in self.tokens[len(self.contents) :]:
            before = self.contents[-1] if self.contents else hash((self.new.lora_id, self.salt))
            self.contents.append(hash((before, token)))
        contents = list(self.contents)
        for token in drafts:
            contents.append(hash((contents[-1], token)))
        return contents


class SimulatedWorker:
    """Runs plans strictly in order; raises AssertionError where a plan could not be run rightly."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        salts: dict[str, str | None],
        errors: dict[str, int],
        draft_accuracy: float | None,
        seed: int,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.salts = salts
        self.errors = errors
        """request id -> output position at which its logits are NaN; -1: in its first chunk."""
        self.draft_accuracy = draft_accuracy
        self.random = random.Random(seed)
        self.requests: dict[str, MirroredRequest] = {}
        self.kv: list[list[int | None]] = []
        self.withdrawn: set[int] = set()
        """Blocks of requests that failed: not to be hit until written again."""
        self.restart()

    def restart(self) -> None:
        self.requests = {}
        self.kv = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.withdrawn = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.apply(plan)
        result = StepResult(plan.epoch, plan.step_id)
        rows = [self.requests[request_id] for request_id in plan.num_scheduled_tokens]
        for row in rows:
            self.check_contents(row, row.computed, row.contents_with([]))
        for row in rows:
            self.write(row, plan)
        for row in rows:
            request_id = row.new.request_id
            drafts = plan.spec_token_ids.get(request_id, [])
            end = row.computed + plan.num_scheduled_tokens[request_id]
            self.check_contents(row, end, row.contents_with(drafts))
            self.finish_row(row, end, drafts, result)
        return result

    def apply(self, plan: StepPlan) -> None:
        for request_id in [*plan.finished_request_ids, *plan.preempted_request_ids]:
            self.requests.pop(request_id, None)
        for request_id, block_ids in plan.new_block_ids.items():
            assert block_ids, "an empty delta"
            self.requests[request_id].blocks += block_ids
            self.withdrawn -= set(block_ids)
        for new in plan.new_requests:
            assert new.request_id not in self.requests, f"{new.request_id} is new twice"
            assert new.num_computed_tokens % self.block_size == 0
            assert new.num_computed_tokens < len(new.token_ids)
            num_hit = new.num_computed_tokens // self.block_size
            assert not self.withdrawn & set(new.block_ids[:num_hit]), "a hit in blocks of a failed request"
            self.withdrawn -= set(new.block_ids[num_hit:])
            self.requests[new.request_id] = MirroredRequest(
                new, self.salts[new.request_id], list(new.token_ids), list(new.block_ids), new.num_computed_tokens
            )

    def check_contents(self, row: MirroredRequest, end: int, contents: list[int]) -> None:
        for position in range(end):
            block = row.blocks[position // self.block_size]
            held = self.kv[block][position % self.block_size]
            assert held == contents[position], f"{row.new.request_id} reads a foreign slot at position {position}"

    def write(self, row: MirroredRequest, plan: StepPlan) -> None:
        request_id = row.new.request_id
        drafts = plan.spec_token_ids.get(request_id, [])
        end = row.computed + plan.num_scheduled_tokens[request_id]
        contents = row.contents_with(drafts)
        assert row.computed < end <= len(contents), f"{request_id} has {len(contents)} tokens, {end} are to be computed"
        assert not drafts or end == len(contents), "drafts come after all known tokens, and all of them are computed"
        others = [r for r in self.requests.values() if r is not row]
        for position in range(row.computed, end):
            block = row.blocks[position // self.block_size]
            assert all(block not in r.blocks for r in others), f"{request_id} writes block {block}, which is shared"
            self.kv[block][position % self.block_size] = contents[position]

    def finish_row(self, row: MirroredRequest, end: int, drafts: list[int], result: StepResult) -> None:
        request_id, prompt_length = row.new.request_id, row.new.num_prompt_tokens
        samples = end >= len(row.tokens)
        error_at = self.errors.get(request_id)
        position = len(row.tokens) - prompt_length
        row.computed = end
        failed = error_at == -1 or (samples and error_at is not None and position >= error_at)
        if failed:
            result.errors[request_id] = "logits are NaN"
        if not samples:
            return
        sampled: list[int] = []
        for draft in [*drafts, None]:
            token = next_token(row.tokens, prompt_length, row.new.sampling_params)
            row.tokens.append(token)
            sampled.append(token)
            if token != draft:
                break
        row.computed = len(row.tokens) - 1
        proposals = self.propose(row)
        if not failed:
            result.sampled_token_ids[request_id] = sampled
            if proposals:
                result.draft_token_ids[request_id] = proposals

    def propose(self, row: MirroredRequest) -> list[int]:
        if self.draft_accuracy is None:
            return []
        tokens = list(row.tokens)
        for _ in range(self.random.randint(0, 4)):
            right = next_token(tokens, row.new.num_prompt_tokens, row.new.sampling_params)
            wrong = (right + 1) % VOCABULARY
            tokens.append(right if self.random.random() < self.draft_accuracy else wrong)
        return tokens[len(row.tokens) :]
