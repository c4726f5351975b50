"""The scheduler again, slow and obvious: every quantity is counted from scratch where it is used.

Written from the rules alone and not from the scheduler, so that the two can be compared step by step.
"""

from reference_state import Flight, ReferenceRequest, ReferenceState

from scheduler.plan import NewRequest, StepPlan


class ReferenceScheduler(ReferenceState):
    # ---- one step

    def schedule(self) -> StepPlan | None:
        self.budget = self.config.max_num_batched_tokens
        self.plan: dict[str, int] = {}
        self.new: list[ReferenceRequest] = []
        self.new_hits: dict[str, int] = {}
        self.tables_before = {r.request_id: len(r.blocks) for r in self.running}
        self.plan_drafts: dict[str, list[int]] = {}
        self.preempted_now: list[ReferenceRequest] = []
        self.preempted_for_running = False

        decoding = [r for r in self.running if r.is_decoding]
        chunks = [r for r in self.running if not r.is_decoding]
        for request in decoding:
            if request in self.running and not self.must_wait(request) and self.room(request) > 0:
                self.run(request, 1)
        self.give_drafts(decoding)
        self.run_chunks_and_admit(chunks)

        for request in self.running:
            request.drafts = []
        if not self.plan:
            return None
        return self.finish_plan()

    def give_drafts(self, decoding: list[ReferenceRequest]) -> None:
        prompts_exist = any(not r.is_decoding for r in self.running) or any(
            r.status in ("WAITING", "PREEMPTED") for r in self.waiting
        )
        reserve = min(self.config.block_size, self.budget) if prompts_exist else 0
        for request in decoding:
            if request.request_id not in self.plan or not request.drafts:
                continue
            count = min(len(request.drafts), self.budget - reserve, self.room(request))
            threshold = self.threshold()
            if 0 < threshold < 1 + len(request.drafts):
                count = min(count, threshold - 1)
            fitting = (len(request.blocks) + len(self.free)) * self.config.block_size - request.computed
            count = min(count, fitting)
            if count <= 0:
                continue
            self.allocate(request, request.computed + count)
            request.computed += count
            self.budget -= count
            self.plan[request.request_id] += count
            self.plan_drafts[request.request_id] = request.drafts[:count]

    def run_chunks_and_admit(self, chunks: list[ReferenceRequest]) -> None:
        order = chunks + self.waiting
        if self.config.policy == "priority":
            order = sorted(order, key=self.rank)
        admitting = True
        for request in order:
            if request in self.running:
                count = self.number(request, len(request.tokens) - request.computed, self.budget)
                if count > 0:
                    self.run(request, count)
            elif admitting:
                stopped = self.preempted_for_running or any(
                    self.is_at_or_before(p, request) for p in self.preempted_now
                )
                admitting = not stopped and self.admit(request)

    def is_at_or_before(self, preempted: ReferenceRequest, request: ReferenceRequest) -> bool:
        """A request preempted in this step stands at the head of the queue, or at its place by priority."""
        if self.config.policy == "fcfs":
            return True
        return self.rank(preempted) <= self.rank(request)

    def run(self, request: ReferenceRequest, count: int) -> None:
        """Schedules `count` tokens of a running request, preempting while blocks are short."""
        while self.blocks_for(request.computed + count) - len(request.blocks) > len(self.free):
            victim = self.running[-1]
            if self.config.policy == "priority":
                victim = max(self.running, key=self.rank)
            self.preempt(victim, "blocks")
            if victim is request:
                return
            self.preempted_for_running = True
        self.schedule_tokens(request, count)

    def schedule_tokens(self, request: ReferenceRequest, count: int) -> None:
        self.allocate(request, request.computed + count)
        request.computed += count
        self.budget -= count
        self.plan[request.request_id] = count

    def preempt(self, request: ReferenceRequest, reason: str) -> None:
        self.budget += self.plan.pop(request.request_id, 0)
        self.plan_drafts.pop(request.request_id, None)
        if request in self.new:
            self.new.remove(request)
        self.running.remove(request)
        self.release(request)
        self.reset(request, reason)
        self.enqueue(request, at_head=True)
        self.pending_preempted.append(request.request_id)
        self.preempted_now.append(request)

    # ---- admission

    def admit(self, request: ReferenceRequest) -> bool:
        """False: admission ends. True: admitted, or skipped with its place kept."""
        if request.status == "WAITING_FOR_FSM" or request.request_id in self.held:
            return True
        lacking = self.what_lacks(request, [])
        victims: list[ReferenceRequest] = []
        if lacking - {"budget"} and self.config.policy == "priority":
            victims = self.victims_for(request)
        if lacking and not victims:
            return "place" in lacking
        for victim in victims:
            self.preempt(victim, "priority")
        self.start(request)
        return True

    def victims_for(self, request: ReferenceRequest) -> list[ReferenceRequest]:
        lower = [r for r in self.running if r.priority > request.priority]
        lower.sort(key=self.rank, reverse=True)
        victims: list[ReferenceRequest] = []
        for candidate in lower:
            victims.append(candidate)
            if not self.what_lacks(request, victims):
                break
        else:
            return []
        for victim in reversed(list(victims)):  # spare the better ones first
            fewer = [v for v in victims if v is not victim]
            if not self.what_lacks(request, fewer):
                victims = fewer
        return victims

    def what_lacks(self, request: ReferenceRequest, gone: list[ReferenceRequest]) -> set[str]:
        """Why a waiting request cannot be admitted were the requests in `gone` preempted."""
        running = [r for r in self.running if r not in gone]
        budget = self.budget + sum(self.plan.get(r.request_id, 0) for r in gone)
        hit = self.lookup(request)
        hit_tokens = len(hit) * self.config.block_size
        owed = len(request.tokens) - hit_tokens
        count = self.number(request, owed, budget, hit_tokens)
        lacking = set()
        if len(running) >= self.config.max_num_seqs:
            lacking.add("seat")
        if self.config.enable_chunked_prefill and count < owed:
            partial = [r for r in running if r.computed < len(r.tokens)]
            if len(partial) >= self.config.max_num_partial_prefills:
                lacking.add("place")
            if owed > self.threshold() and sum(r.is_long for r in partial) >= self.config.max_long_partial_prefills:
                lacking.add("place")
        referenced = {b for r in running for b in r.blocks}
        owed_by_chunks = sum(self.blocks_for(len(r.tokens)) - len(r.blocks) for r in running if not r.is_decoding)
        available = self.num_blocks - len(referenced) - len(set(hit) - referenced) - owed_by_chunks - len(running)
        if self.blocks_for(len(request.tokens)) - len(hit) > available:
            lacking.add("blocks")
        if count == 0:
            lacking.add("budget")
        return lacking

    def start(self, request: ReferenceRequest) -> None:
        hit = self.lookup(request)
        hit_tokens = len(hit) * self.config.block_size
        request.blocks = list(hit)
        self.free = [b for b in self.free if b not in hit]
        request.computed = hit_tokens
        request.published = len(hit)
        request.is_long = len(request.tokens) - hit_tokens > self.threshold()
        if request.num_cached is None:
            request.num_cached = min(hit_tokens, len(request.prompt))
        request.status = "RUNNING"
        self.waiting.remove(request)
        self.running.append(request)
        self.new.append(request)
        self.new_hits[request.request_id] = hit_tokens
        self.schedule_tokens(request, self.number(request, len(request.tokens) - hit_tokens, self.budget, hit_tokens))

    # ---- limits

    def threshold(self) -> int:
        return self.config.long_prefill_token_threshold if self.config.enable_chunked_prefill else 0

    def number(self, request: ReferenceRequest, owed: int, budget: int, computed: int | None = None) -> int:
        if not self.config.enable_chunked_prefill:
            return owed if owed <= budget else 0
        if 0 < self.threshold() < owed:
            owed = self.threshold()
        return min(owed, budget, self.room(request, computed))

    def room(self, request: ReferenceRequest, computed: int | None = None) -> int:
        if computed is None:
            computed = request.computed
        return min(self.config.max_model_len, len(request.prompt) + request.max_tokens) - 1 - computed

    def must_wait(self, request: ReferenceRequest) -> bool:
        return request.placeholders > 0 and (request.has_grammar or self.config.uses_drafter)

    # ---- the plan

    def finish_plan(self) -> StepPlan:
        flights: dict[str, Flight] = {}
        for request_id in self.plan:
            request = self.requests[request_id]
            samples = request.computed >= request.known
            drafts = self.plan_drafts.get(request_id, [])
            flights[request_id] = Flight(request.stay, request.computed, drafts, samples)
            request.placeholders += samples
            self.publish(request, min(request.computed, len(request.prompt)))
        self.step_id += 1
        self.flights[self.step_id] = flights
        new_ids = [r.request_id for r in self.new]
        old = [self.requests[i] for i in self.plan if i not in new_ids]
        added = {r.request_id: r.blocks[self.tables_before[r.request_id] :] for r in old}
        plan = StepPlan(
            self.epoch,
            self.step_id,
            self.plan,
            [
                NewRequest(
                    r.request_id,
                    r.tokens,
                    len(r.prompt),
                    r.params,
                    list(r.blocks),
                    self.new_hits[r.request_id],
                    r.lora_id,
                )
                for r in self.new
            ],
            {request_id: blocks for request_id, blocks in added.items() if blocks},
            self.plan_drafts,
            self.pending_finished,
            self.pending_preempted,
        )
        self.pending_finished = []
        self.pending_preempted = []
        return plan
