"""The scheduler: queues, budget, KV blocks and results brought together."""

from collections import deque
from collections.abc import Collection, Sequence

from scheduler import integrity
from scheduler.admission import Admission, Lack
from scheduler.budget import Budget, StaticBudget
from scheduler.config import SchedulerConfig
from scheduler.in_flight import Flight, InFlight
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.limits import clip_max_tokens, cut_at_stop, is_long_prefill, num_new_tokens
from scheduler.plan import RequestOutput, SchedulerStats, StepLoad, StepPlan, StepResult
from scheduler.request import Request, RequestRefused, RequestStatus
from scheduler.request_queue import make_queue
from scheduler.step import Step

_RUNNING = RequestStatus.RUNNING
_LENGTH_WEIGHT = 0.05
"""Of one ended request in the mean length of an answer."""


class Scheduler:
    """Decides which request computes how many tokens in the next step, and keeps the books.

    One thread calls it. It knows no clock and no device: plans go out by `schedule()`, what became of
    them comes back by `update_from_result()`, in the order of the plans; adds, aborts and the rest
    apply between steps.
    """

    def __init__(self, config: SchedulerConfig, num_blocks: int, budget: Budget | None = None) -> None:
        """Raises ValueError if a sequence of max_model_len tokens would not fit into the blocks."""
        if config.max_model_len > num_blocks * config.block_size:
            raise ValueError(
                f"max_model_len ({config.max_model_len}) is above what {num_blocks} blocks of"
                f" {config.block_size} tokens hold ({num_blocks * config.block_size})"
            )
        self.config = config
        self.num_blocks = num_blocks
        self.budget: Budget = StaticBudget(config.max_num_batched_tokens) if budget is None else budget
        self.kv_cache_manager = KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self._admission = Admission(config, self.kv_cache_manager)
        self.epoch = 0
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        """In admission order."""
        self.waiting = make_queue(config.policy)
        self._waiting_for_grammar: set[str] = set()
        self._in_flight = InFlight()
        self._held: frozenset[str] = frozenset()
        self._num_steps = 0
        self._num_added = 0
        self._finished_request_ids: list[str] = []  # held by the workers until the next plan
        self._preempted_request_ids: list[str] = []
        self._token_budget = 0
        self._token_budget_reason = ""
        self._num_preemptions = {"blocks": 0, "priority": 0, "epoch": 0, "hold": 0}
        self._prompt_tokens = self._prompt_tokens_cached = self._generation_tokens = self._recomputed_tokens = 0
        self._prefix_cache_queries = self._prefix_cache_hits = 0
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = 0
        self.mean_output_tokens: float | None = None
        """Of requests that have ended by themselves, the last ones most."""

    # Requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request and clip its max_tokens to the room that max_model_len leaves.

        One that comes with output goes ahead of new ones (of its priority).

        Raises RequestRefused if it can never be served. What is accepted always fits the blocks,
        because a sequence of max_model_len does.
        """
        if request.request_id in self.requests:
            raise RequestRefused(f"request id {request.request_id!r} is in use", "request_id")
        clip_max_tokens(self.config, request)
        request.arrival_index = self._num_added
        self._num_added += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if request.status is RequestStatus.WAITING_FOR_FSM:
            self._waiting_for_grammar.add(request.request_id)

    def finish_request(self, request_id: str, status: RequestStatus) -> None:
        """End a request from outside, whatever its state, and free all it holds at once.

        An unknown id is no error: the request may have ended in the same moment. Results on their way
        to it are void. Raises ValueError if `status` is not a finished one.
        """
        if not status.is_finished:
            raise ValueError(f"cannot finish a request with status {status.name}")
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.status is _RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request, status)

    def mark_grammar_ready(self, request_id: str) -> None:
        """Its grammar has compiled: from now on it competes. Unknown or ready: nothing happens."""
        if request_id in self._waiting_for_grammar:
            self._waiting_for_grammar.remove(request_id)
            self.requests[request_id].status = RequestStatus.WAITING

    def hold(self, request_ids: Collection[str]) -> None:
        """These compute nothing until the next `hold`, everybody else competes.

        Running ones are preempted, so that nobody waits for a seat or blocks that idle; what the
        prefix cache still has of them by then is not computed again.
        """
        self._held = frozenset(request_ids)
        held = [request for request in self.running if request.request_id in self._held]
        if held:
            self.running = [request for request in self.running if request.request_id not in self._held]
        for request in reversed(held):
            self._preempted_request_ids.append(request.request_id)
            self._release_stay(request, "hold")

    def end_epoch(self) -> None:
        """The workers' memory is lost: every running request starts over, in admission order.

        Results of the old epoch are ignored, the prefix cache is empty, and nothing is pending for
        the new workers, who know no request.
        """
        for request in reversed(self.running):
            self._release_stay(request, "epoch")
        self.running.clear()
        self.kv_cache_manager.block_pool.forget_all()
        self._in_flight.clear()
        self._finished_request_ids = []
        self._preempted_request_ids = []
        self.epoch += 1

    # Planning a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step: how many tokens each request computes.

        A request has a sequence of tokens and one progress integer. Every step tries to make
        `num_computed_tokens` catch up with `num_tokens`. Chunked prefill, prefix-cache hits, draft
        tokens and recovery after a preemption are all "how many tokens does it still owe"; there is
        no prefill phase and no decode phase.

        1. Every decoding request gets its one token, before any chunk can take the budget. Exempt are
           those that wait for a result and those at their limit.
        2. Drafts ride along on free blocks and on what is left of the budget, less a block's worth
           where a prompt waits for it. Drafts that find no room are dropped.
        3. Running chunks follow in admission order.
        4. Waiting requests are admitted in policy order. One that is not ready is skipped and keeps
           its place; the first ready one that does not fit ends admission, so that nothing starves
           behind a stream of small ones. The priority policy sorts 3 and 4 into one order.

        When blocks run out for a running request, the policy names a victim, which loses everything
        and waits again. Progress advances here, not when the result arrives, so that the next step
        can be planned while this one runs (Sarathi-Serve, arXiv 2403.02310, for decodes before
        chunks; vLLM V1 for the unified progress).

        Returns None if there is nothing to compute, or `overlap_depth` plans are in flight; finished
        and preempted ids then wait for the next plan.
        """
        if len(self._in_flight) >= self.config.overlap_depth:
            return None
        num_tokens, reason = self.budget.next_step(self.running)
        num_tokens = min(num_tokens, self.config.max_num_batched_tokens)
        step = Step(num_tokens)
        if self.config.policy == "priority":
            step.largest_priority = max((request.priority for request in self.running), default=None)
        self._schedule_decodes(step)
        self._schedule_drafts(step)
        self._schedule_chunks_and_prompts(step)
        if not step.num_scheduled_tokens:
            return None
        self._token_budget, self._token_budget_reason = num_tokens, reason
        return self._send(step)

    def _schedule_decodes(self, step: Step) -> None:
        """Give each decoding request its token; sort out the chunks."""
        for request in tuple(self.running):
            if request.status is not _RUNNING:
                continue  # the victim of a request before it
            if not request.is_decoding:
                step.chunks.append(request)
                step.partials[request.request_id] = request
            elif not (request.num_output_placeholders and self._needs_token_value(request)):
                self._schedule_running(request, step)
                if request.spec_token_ids:
                    step.drafting.append(request)

    def _schedule_drafts(self, step: Step) -> None:
        """Add draft tokens to decodes of this step, where they cost nobody else anything."""
        prompts_wait = step.partials or len(self.waiting) > len(self._waiting_for_grammar)
        reserved = self.config.block_size if prompts_wait else 0
        for request in step.drafting:
            drafts, request.spec_token_ids = request.spec_token_ids, []
            if request.request_id not in step.num_scheduled_tokens:
                continue
            computed = request.num_computed_tokens
            room = min(step.budget - reserved, self.kv_cache_manager.capacity(request) - computed, len(drafts))
            if room <= 0:
                continue
            # The request's one token is scheduled already: count it again, together with its drafts.
            num_drafts = num_new_tokens(self.config, request, computed - 1, room + 1, num_drafts=room) - 1
            if num_drafts > 0:
                block_ids = self.kv_cache_manager.allocate(request, computed + num_drafts)
                assert block_ids is not None  # within its capacity
                step.add(request, num_drafts, block_ids)
                step.spec_token_ids[request.request_id] = drafts[:num_drafts]

    def _schedule_chunks_and_prompts(self, step: Step) -> None:
        """Run through running chunks and waiting requests in the one order that the policy gives them."""
        chunks = deque(self.waiting.sort(step.chunks))
        while True:
            head = self.waiting.peek() if step.admits and self.waiting else None
            if chunks and (head is None or not self.waiting.precedes(head, chunks[0])):
                chunk = chunks.popleft()
                if chunk.status is _RUNNING:
                    self._schedule_running(chunk, step)
            elif head is not None:
                self._schedule_waiting(head, step)
            else:
                break
        for request in reversed(step.skipped):
            self.waiting.put_back(request)

    def _schedule_running(self, request: Request, step: Step) -> None:
        """Schedule what a running request owes, preempting for its blocks; 0 tokens: skip it."""
        computed = request.num_computed_tokens
        num_tokens = num_new_tokens(self.config, request, computed, step.budget)
        if num_tokens <= 0:
            return
        while (block_ids := self.kv_cache_manager.allocate(request, computed + num_tokens)) is None:
            victim = self.waiting.victim(self.running)
            self._preempt(victim, "blocks", step)
            if victim is request:
                return
            step.admits = False
        step.add(request, num_tokens, block_ids)

    def _schedule_waiting(self, request: Request, step: Step) -> None:
        """Admit the head of the queue, skip it, or end admission."""
        may_evict = step.largest_priority is not None and step.largest_priority > request.priority
        all_taken = step.budget <= 0 or len(self.running) >= self.config.max_num_seqs
        if request.request_id in step.preempted or (all_taken and not may_evict):
            step.admits = False  # where all is taken, nobody behind it could be admitted either
            return
        compiling = request.status is RequestStatus.WAITING_FOR_FSM
        held = request.request_id in self._held
        if compiling or held or self._admission.is_surely_held_back(request, step, may_evict):
            step.skipped.append(self.waiting.pop())
            return
        hit = self.kv_cache_manager.find_hit(request)
        num_tokens, lack = self._admission.try_to_fit(request, hit, self.running, step)
        if may_evict and lack not in (None, Lack.BUDGET):
            for victim in self._admission.find_victims(request, hit, self.running, step):
                self._preempt(victim, "priority", step)
            num_tokens, lack = self._admission.try_to_fit(request, hit, self.running, step)
        if lack is None:
            self._admit(request, hit, num_tokens, step)
        elif lack is Lack.PLACE:
            step.skipped.append(self.waiting.pop())
        else:
            step.admits = False

    def _needs_token_value(self, request: Request) -> bool:
        """Its next step depends on which token was sampled, so it cannot run ahead of results."""
        return request.has_grammar or self.config.uses_drafter

    # Admission and preemption

    def _admit(self, request: Request, hit: Sequence[int], num_tokens: int, step: Step) -> None:
        """Move the head of the queue to the running requests and schedule its first tokens."""
        self.waiting.pop()
        self.kv_cache_manager.admit(request, hit)
        num_hit_tokens = len(hit) * self.config.block_size
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            if not request.was_resubmitted:  # else it was counted where it was taken first
                self._prompt_tokens += request.num_prompt_tokens
                self._prompt_tokens_cached += request.num_cached_tokens
        if self.kv_cache_manager.uses_cache(request):
            self._prefix_cache_queries += request.num_tokens
            self._prefix_cache_hits += num_hit_tokens
        self._recomputed_tokens += max(0, request.num_lost_tokens - num_hit_tokens)
        request.num_lost_tokens = 0
        request.is_long_prefill = is_long_prefill(self.config, request, num_hit_tokens)
        request.status = _RUNNING
        request.num_computed_tokens = num_hit_tokens
        self.running.append(request)
        if self.kv_cache_manager.allocate(request, num_hit_tokens + num_tokens) is None:
            raise AssertionError(f"{request!r} was admitted without blocks")
        step.add_new(request, num_tokens, self.kv_cache_manager.tables[request.request_id])

    def _preempt(self, victim: Request, reason: str, step: Step) -> None:
        """Take a running request out of the plan and back to the queue; it keeps only its tokens."""
        if step.take_back(victim):
            self._preempted_request_ids.append(victim.request_id)
        self.running.remove(victim)
        self._release_stay(victim, reason)

    def _release_stay(self, request: Request, reason: str) -> None:
        """End a stay in RUNNING: rather recompute than believe memory that is given back."""
        self.kv_cache_manager.free(request)
        request.num_lost_tokens = min(request.num_computed_tokens, request.num_tokens)
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._num_preemptions[reason] += 1
        self.waiting.put_back(request)

    def _send(self, step: Step) -> StepPlan:
        """Make the step final: count the outputs that it will bring, and share its prompt blocks.

        Prompt blocks are published now, so that a burst of requests shares them from the next plan
        on; plans run in order, and a step that fails ends the epoch.
        """
        flights: list[Flight] = []
        requests, spec_token_ids = self.requests, step.spec_token_ids
        num_chunk_tokens = decode_context = chunk_pairs = 0
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = requests[request_id]
            progress = request.num_computed_tokens
            samples = progress >= request.num_tokens + request.num_output_placeholders
            if samples:
                request.num_output_placeholders += 1
            if progress - num_tokens < request.num_prompt_tokens:
                self.kv_cache_manager.publish(request, min(progress, request.num_prompt_tokens))
            num_drafts = len(spec_token_ids.get(request_id, ())) if spec_token_ids else 0
            if num_tokens - num_drafts == 1:
                decode_context += progress
            else:
                num_chunk_tokens += num_tokens
                chunk_pairs += num_tokens * (2 * progress - num_tokens + 1) // 2
            flights.append((request, request.num_preemptions, progress, num_drafts, samples))
        plan = StepPlan(
            epoch=self.epoch,
            step_id=self._num_steps,
            num_scheduled_tokens=step.num_scheduled_tokens,
            new_requests=list(step.new_requests.values()),
            new_block_ids=step.new_block_ids,
            spec_token_ids=step.spec_token_ids,
            finished_request_ids=self._finished_request_ids,
            preempted_request_ids=self._preempted_request_ids,
        )
        num_decode_tokens = sum(step.num_scheduled_tokens.values()) - num_chunk_tokens
        load = StepLoad(num_decode_tokens, num_chunk_tokens, decode_context, chunk_pairs)
        self._in_flight.add(plan.step_id, flights, load)
        self._num_steps += 1
        self._finished_request_ids = []
        self._preempted_request_ids = []
        return plan

    # Results

    def update_from_result(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what a step gave: tokens, rejected drafts, ends and errors.

        A result counts only for the stay in RUNNING that its plan was made for; an abort or a
        preemption in between voids it. Results of an old epoch are ignored. Raises ValueError if the
        result is not that of the oldest plan in flight, or lacks the tokens of a request that sampled.
        """
        if result.epoch != self.epoch:
            return []
        flights = self._in_flight.take(plan, result)
        self.budget.observe(plan, result)
        outputs = []
        num_requests = len(self.requests)
        for request, stay, progress, num_drafts, samples in flights:
            if request.num_preemptions != stay or request.status is not _RUNNING:
                continue
            output = self._apply(request, progress, num_drafts, samples, result)
            if output is not None:
                outputs.append(output)
        if len(self.requests) < num_requests:
            self.running = [request for request in self.running if request.status is _RUNNING]
        return outputs

    def _apply(
        self, request: Request, progress: int, num_drafts: int, samples: bool, result: StepResult
    ) -> RequestOutput | None:
        """What a result means for one request. None: a partial prefill has nothing to say."""
        request_id = request.request_id
        if result.errors and request_id in result.errors:
            self._finish(request, RequestStatus.FINISHED_ERROR)
            return RequestOutput(request_id, [], "error", request.num_cached_tokens, error=result.errors[request_id])
        output = None
        status = None
        if samples:
            token_ids = result.sampled_token_ids.get(request_id, [])
            if not 1 <= len(token_ids) <= num_drafts + 1:
                raise ValueError(
                    f"result of step {result.step_id} has {len(token_ids)} tokens for request {request_id!r},"
                    f" which verified {num_drafts} drafts"
                )
            request.num_output_placeholders -= 1
            if num_drafts:
                num_rejected = num_drafts + 1 - len(token_ids)
                progress -= num_rejected
                request.num_computed_tokens -= num_rejected
                self._num_drafts += 1
                self._num_draft_tokens += num_drafts
                self._num_accepted_tokens += len(token_ids) - 1
            token_ids, status = cut_at_stop(request, token_ids)
            request.append_output_token_ids(token_ids)
            self._generation_tokens += len(token_ids)
            output = RequestOutput(request_id, token_ids, None, request.num_cached_tokens)
            if result.logprobs and request_id in result.logprobs:
                output.logprobs = result.logprobs[request_id][: len(token_ids)]
            if result.draft_token_ids and request.num_output_placeholders == 0:
                request.spec_token_ids = list(result.draft_token_ids.get(request_id, ()))
        if result.prompt_logprobs and request_id in result.prompt_logprobs:
            output = output or RequestOutput(request_id, [], None, request.num_cached_tokens)
            output.prompt_logprobs = result.prompt_logprobs[request_id]
        self.kv_cache_manager.publish(request, min(progress, request.num_tokens))
        if status is not None and output is not None:
            output.finish_reason = status.value
            self._finish(request, status)
        return output

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Free all that a request holds. The caller takes it out of its queue."""
        if request.status is _RUNNING:
            if status is RequestStatus.FINISHED_ERROR:
                self.kv_cache_manager.withdraw(request)
            self.kv_cache_manager.free(request)
            self._finished_request_ids.append(request.request_id)
        self._waiting_for_grammar.discard(request.request_id)
        if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
            num_tokens = len(request.output_token_ids)
            mean = num_tokens if self.mean_output_tokens is None else self.mean_output_tokens
            self.mean_output_tokens = mean + _LENGTH_WEIGHT * (num_tokens - mean)
        request.status = status
        request.spec_token_ids = []
        request.num_output_placeholders = 0
        del self.requests[request.request_id]

    # Looking in

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def load_of(self, plan: StepPlan) -> StepLoad:
        """What a plan in flight computes. Raises LookupError if it is not in flight."""
        return self._in_flight.load_of(plan)

    def positions_in_flight(self) -> dict[str, int]:
        """Open request in a plan in flight -> the last token computed for it, counted with its prompt."""
        return self._in_flight.positions()

    def take_cache_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes of the blocks that came into the prefix cache, and that left it, since the last call."""
        return self.kv_cache_manager.block_pool.changes.take()

    def cached_hashes(self) -> list[bytes]:
        """Hashes of all blocks in the prefix cache."""
        return self.kv_cache_manager.block_pool.cached_hashes()

    def stats(self) -> SchedulerStats:
        """Gauges as of now, and the counters."""
        return SchedulerStats(
            num_requests_running=len(self.running),
            num_requests_waiting=len(self.waiting),
            num_requests_waiting_for_grammar=len(self._waiting_for_grammar),
            num_blocks=self.num_blocks,
            num_used_blocks=self.num_blocks - self.kv_cache_manager.block_pool.num_free_blocks,
            token_budget=self._token_budget,
            token_budget_reason=self._token_budget_reason,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            generation_tokens=self._generation_tokens,
            num_preemptions=dict(self._num_preemptions),
            recomputed_tokens=self._recomputed_tokens,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def check_integrity(self) -> None:
        """Prove the block pool and the scheduler's own books. Raises AssertionError at the first lie."""
        integrity.check(
            self.config,
            self.kv_cache_manager,
            self.requests,
            self.running,
            self.waiting,
            self._waiting_for_grammar,
            len(self._in_flight),
        )
