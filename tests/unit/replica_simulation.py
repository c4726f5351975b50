"""Replicas with the real scheduler in virtual time, behind a router: who gets what, and how long first tokens take."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.backlog import measure
from scheduler.config import SchedulerConfig
from scheduler.plan import ReplicaReport, StepPlan, StepResult
from scheduler.request import Request
from scheduler.routing import RoutedRequest, RoutingTable
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

BLOCK = 16
STEP_SECONDS, TOKEN_SECONDS = 0.002, 1e-4
"""Of a step, and of each token that it computes: 1,024 tokens take 110 ms in steps of 256."""
REPORT_SECONDS = 0.05

Router = Callable[[Request, float], int]


@dataclass
class Replica:
    """One engine: its scheduler, and the plan that it computes."""

    scheduler: Scheduler
    plan: StepPlan | None = None
    num_requests: int = 0
    num_tokens: int = 0
    """Computed, decodes included."""
    sequence: int = 0

    def start_step(self) -> float | None:
        """Seconds until it ends."""
        if self.plan is not None or (plan := self.scheduler.schedule()) is None:
            return None
        self.plan = plan
        num_tokens = sum(plan.num_scheduled_tokens.values())
        self.num_tokens += num_tokens
        return STEP_SECONDS + TOKEN_SECONDS * num_tokens

    def end_step(self) -> list[str]:
        """Requests that have got a token."""
        plan, self.plan = self.plan, None
        assert plan is not None
        requests = self.scheduler.requests
        sampled = [name for name in plan.num_scheduled_tokens if not requests[name].is_partial
                   or requests[name].num_output_placeholders]  # fmt: skip
        self.scheduler.update_from_result(plan, StepResult(plan.epoch, plan.step_id, {name: [1] for name in sampled}))
        return sampled

    def report(self, *, is_snapshot: bool = False) -> ReplicaReport:
        added, removed = self.scheduler.take_cache_changes()
        self.sequence += 1
        return ReplicaReport(
            self.sequence,
            is_snapshot,
            BLOCK,
            measure(self.scheduler).num_tokens,
            256 / (STEP_SECONDS + 256 * TOKEN_SECONDS),
            self.scheduler.cached_hashes() if is_snapshot else added,
            removed,
        )


@dataclass
class Outcome:
    """Of one run."""

    first_token_seconds: list[float] = field(default_factory=list)
    hit_rate: float = 0.0
    """Of all prompt tokens."""
    shares: list[float] = field(default_factory=list)
    """Requests of each replica, 1 is the mean."""

    def p95(self) -> float:
        return sorted(self.first_token_seconds)[int(0.95 * len(self.first_token_seconds))]


class Simulation:
    """Requests at their times, each to the replica that the router names."""

    def __init__(self, num_replicas: int, num_blocks: int) -> None:
        config = SchedulerConfig(4096, 256, 32, BLOCK)
        self.replicas = [Replica(Scheduler(config, num_blocks)) for _ in range(num_replicas)]
        self.table = RoutingTable(max_age=2.5)
        self.open: dict[str, int] = {}

    def predicted(self, request: Request, now: float) -> int:
        """The router under test."""
        asked = RoutedRequest(request.request_id, request.prompt_token_ids)
        return int(self.table.route(asked, [str(index) for index in range(len(self.replicas))], now).replicas[0])

    def power_of_two(self, rng: random.Random) -> Router:
        """As Serve does by default: two at random, the one with fewer open requests."""

        def route(request: Request, now: float) -> int:
            open_at = [list(self.open.values()).count(index) for index in range(len(self.replicas))]
            return min(rng.sample(range(len(self.replicas)), 2), key=lambda index: open_at[index])

        return route

    def affinity(self, rng: random.Random) -> Router:
        """As Serve's PrefixCacheAffinityRouter: whoever got the longest common prefix before, else the least tokens."""
        seen: list[dict[tuple[int, ...], None]] = [{} for _ in self.replicas]

        def route(request: Request, now: float) -> int:
            ids = request.prompt_token_ids
            prefixes = [tuple(ids[:end]) for end in range(len(ids), len(ids) // 10, -BLOCK)]
            for prefix in prefixes:
                holders = [index for index in range(len(self.replicas)) if prefix in seen[index]]
                if holders:
                    chosen = rng.choice(holders)
                    break
            else:
                fewest = min(len(each) for each in seen)
                chosen = rng.choice([index for index, each in enumerate(seen) if len(each) == fewest])
            seen[chosen].update(dict.fromkeys(prefixes))
            return chosen

        return route

    def run(self, arrivals: Sequence[tuple[float, list[int], int]], route: Router) -> Outcome:
        """`arrivals`: (seconds, prompt, output tokens), in order."""
        outcome = Outcome()
        events: list[tuple[float, int, str, int]] = []  # (time, order, what, index)
        for index, (at, _, _) in enumerate(arrivals):
            heapq.heappush(events, (at, len(events), "arrival", index))
        count = len(events)
        heapq.heappush(events, (0.0, count, "report", 0))
        waiting: dict[str, float] = {}
        num_prompt = num_hit = 0
        while events:
            now, _, what, index = heapq.heappop(events)
            if what == "arrival":
                _, prompt, num_output = arrivals[index]
                request = Request(f"r{index}", prompt, SamplingParams(max_tokens=num_output), now)
                target = route(request, now)
                self.replicas[target].scheduler.add_request(request)
                self.replicas[target].num_requests += 1
                self.table.admitted(request.request_id)
                waiting[request.request_id] = now
                self.open[request.request_id] = target
            elif what == "report":
                for name, replica in enumerate(self.replicas):
                    assert self.table.update(str(name), replica.report(is_snapshot=now == 0.0), now)
                if any(event[2] != "report" for event in events):
                    count += 1
                    heapq.heappush(events, (now + REPORT_SECONDS, count, "report", 0))
                continue
            else:
                for request_id in self.replicas[index].end_step():
                    if request_id in waiting:
                        outcome.first_token_seconds.append(now - waiting.pop(request_id))
                        self.table.settled(request_id)
                    if request_id not in self.replicas[index].scheduler.requests:
                        del self.open[request_id]
            for name, replica in enumerate(self.replicas):
                seconds = replica.start_step()
                if seconds is not None:
                    count += 1
                    heapq.heappush(events, (now + seconds, count, "step", name))
        stats = [replica.scheduler.stats() for replica in self.replicas]
        num_prompt = sum(each.prompt_tokens for each in stats)
        num_hit = sum(each.prompt_tokens_cached for each in stats)
        outcome.hit_rate = num_hit / num_prompt
        mean = len(arrivals) / len(self.replicas)
        outcome.shares = [replica.num_requests / mean for replica in self.replicas]
        return outcome


def zipf_arrivals(
    seed: int, count: int, rate: float, exponent: float = 1.0, num_prefixes: int = 12, num_output: int = 16
) -> list[tuple[float, list[int], int]]:
    """Poisson arrivals, each one of the prefixes of 1,024 tokens and 64 tokens of its own."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(1024)] for _ in range(num_prefixes)]
    weights = [1 / (rank + 1) ** exponent for rank in range(num_prefixes)]
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prefix = rng.choices(prefixes, weights)[0]
        arrivals.append((now, prefix + [rng.randrange(1000) for _ in range(64)], num_output))
    return arrivals
