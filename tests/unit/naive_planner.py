"""Random but lawful plans over a naive picture of the requests, with the results that they must give.

The picture is one list of tokens and one progress a request. It knows every token in advance, because
the model under it is `counting_model`, and so it can plan ahead of results that nobody has seen yet.
"""

import random
from dataclasses import dataclass, field

from counting_model import VOCAB_SIZE, continuation

from scheduler.plan import NewRequest, StepPlan
from scheduler.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


@dataclass
class NaiveRequest:
    request_id: str
    tokens: list[int]
    """Known, tokens of steps in flight included."""
    num_prompt: int
    num_seen: int
    """Tokens that an engine knows which has seen the results so far."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    stay: int = 0
    awaits_verification: bool = False


@dataclass
class NaiveStep:
    plan: StepPlan
    expected: dict[str, list[int]] = field(default_factory=dict)
    lengths: list[tuple[NaiveRequest, int, int]] = field(default_factory=list)
    """(request, stay, known tokens after the step)"""


class NaivePlanner:
    def __init__(self, seed: int, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int) -> None:
        self.random = random.Random(seed)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.running: list[NaiveRequest] = []
        self.preempted: list[NaiveRequest] = []
        self.pending_finished: list[str] = []
        self.pending_preempted: list[str] = []
        self.step_id = 0
        self.num_created = 0

    def next_step(self) -> NaiveStep | None:
        """None where chance left nothing to schedule: such a plan is not sent, its leaving ids go into the next."""
        for request in list(self.running):
            if len(request.tokens) > self.max_model_len - 8 or self.random.random() < 0.05:
                self.leave(request, self.pending_finished, kept_blocks=0)
            elif self.random.random() < 0.08:
                # What was full of tokens that were seen may come back as a prefix-cache hit.
                full = min(request.computed, request.num_seen - 1) // self.block_size
                self.leave(request, self.pending_preempted, kept_blocks=self.random.randint(0, full))
                self.preempted.append(request)
        step = NaiveStep(StepPlan(1, self.step_id, {}))
        for request in self.random.sample(self.running, len(self.running)):
            if not request.awaits_verification and self.random.random() < 0.8:
                self.schedule(request, step, is_new=False)
        while len(self.running) < self.max_num_seqs and self.random.random() < 0.5:
            request = self.preempted.pop() if self.preempted and self.random.random() < 0.6 else self.create()
            if self.schedule(request, step, is_new=True):
                self.running.append(request)
            else:
                self.preempted.append(request)
                break
        if not step.plan.num_scheduled_tokens:
            return None
        step.plan.finished_request_ids.extend(self.pending_finished)
        step.plan.preempted_request_ids.extend(self.pending_preempted)
        self.pending_finished, self.pending_preempted = [], []
        self.step_id += self.random.randint(1, 3)
        return step

    def show_result(self, step: NaiveStep) -> None:
        """The engine sees the step's tokens now; they count only for the stay that they were planned for."""
        for request, stay, length in step.lengths:
            if request.stay == stay:
                request.num_seen = length
                if request.request_id in step.plan.spec_token_ids:
                    request.awaits_verification = False

    def create(self) -> NaiveRequest:
        self.num_created += 1
        length = self.random.randint(1, self.max_model_len // 2)
        tokens = [self.random.randrange(VOCAB_SIZE) for _ in range(length)]
        return NaiveRequest(f"r{self.num_created}", tokens, length, length)

    def leave(self, request: NaiveRequest, ids: list[str], kept_blocks: int) -> None:
        self.running.remove(request)
        ids.append(request.request_id)
        self.free_blocks += request.blocks[kept_blocks:]
        del request.blocks[kept_blocks:]
        del request.tokens[request.num_seen :]
        request.computed = kept_blocks * self.block_size
        request.stay += 1
        request.awaits_verification = False

    def schedule(self, request: NaiveRequest, step: NaiveStep, is_new: bool) -> bool:
        """Put the request into the plan, if there are blocks for it."""
        owed = len(request.tokens) - request.computed
        count = self.random.choice([owed, owed, self.random.randint(1, owed)])
        drafts: list[int] = []
        if count == owed and self.random.random() < 0.3:
            drafts = self.drafts_for(request.tokens)
        num_blocks = -(-(request.computed + count + len(drafts)) // self.block_size) - len(request.blocks)
        if num_blocks > len(self.free_blocks):
            return False
        added = [self.free_blocks.pop(self.random.randrange(len(self.free_blocks))) for _ in range(max(0, num_blocks))]
        request.blocks += added
        plan = step.plan
        plan.num_scheduled_tokens[request.request_id] = count + len(drafts)
        if is_new:
            new = NewRequest(
                request.request_id,
                list(request.tokens),
                request.num_prompt,
                GREEDY,
                list(request.blocks),
                request.computed,
            )
            plan.new_requests.append(new)
        elif added:
            plan.new_block_ids[request.request_id] = added
        request.computed += count
        if count == owed:
            right = continuation(request.tokens, len(drafts) + 1)
            accepted = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))
            sampled = right[: accepted + 1]
            request.tokens += sampled
            request.computed = len(request.tokens) - 1
            step.expected[request.request_id] = sampled
            step.lengths.append((request, request.stay, len(request.tokens)))
        if drafts:
            plan.spec_token_ids[request.request_id] = drafts
            request.awaits_verification = True
        return True

    def drafts_for(self, tokens: list[int]) -> list[int]:
        right = continuation(tokens, self.random.randint(1, 4))
        num_right = self.random.randint(0, len(right))
        return right[:num_right] + [(token + 1) % VOCAB_SIZE for token in right[num_right:]]
