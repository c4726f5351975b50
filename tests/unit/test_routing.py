"""The choice of a replica: against a slow obvious reference, and case by case."""

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.block_hashes import chain, root_hash
from scheduler.plan import ReplicaReport
from scheduler.routing import RoutedRequest, RoutingTable

BLOCK = 4
MAX_AGE = 2.5
NAMES = ["a", "b", "c"]


def hashes(*token_ids: int) -> list[bytes]:
    return chain(root_hash(None, None), token_ids, BLOCK)


def report(sequence: int, *, added: list[bytes] | None = None, removed: list[bytes] | None = None, queued: int = 0,
           rate: float = 100.0, snapshot: bool = False) -> ReplicaReport:  # fmt: skip
    return ReplicaReport(sequence, snapshot, BLOCK, queued, rate, added or [], removed or [])


def table(**queued: int) -> RoutingTable:
    """Replicas with empty caches."""
    made = RoutingTable(MAX_AGE)
    for name, tokens in queued.items():
        assert made.update(name, report(0, queued=tokens, snapshot=True), 0.0)
    return made


def request(name: str, *token_ids: int, uses_cache: bool = True) -> RoutedRequest:
    return RoutedRequest(name, token_ids, uses_cache=uses_cache)


PROMPT = tuple(range(40))


def test_the_holder_of_the_prefix_gets_it_until_its_queue_costs_more() -> None:
    for queued, chosen, reason in [(0, "a", "hit"), (50, "a", "hit"), (120, "b", "least_work")]:
        views = table(a=0, b=0)
        views.update("a", report(1, added=hashes(*PROMPT[:36]), queued=queued), 0.0)
        route = views.route(request("r", *PROMPT), ["a", "b"], 0.0)
        assert (route.replicas[0], route.reason) == (chosen, reason), queued
        assert sorted(route.replicas) == ["a", "b"]


def test_the_prediction_is_queue_and_rest_over_the_rate() -> None:
    views = table(a=0)
    views.update("a", report(1, added=hashes(*PROMPT[:8]), queued=60, rate=50.0), 0.0)
    route = views.route(request("r", *PROMPT), ["a"], 1.0)
    assert (route.num_hit_tokens, route.seconds, route.view_age) == (8, (60 + 32) / 50.0, 1.0)


def test_one_token_at_least_is_computed() -> None:
    views = table(a=0)
    views.update("a", report(1, added=hashes(*PROMPT)), 0.0)
    assert views.route(request("r", *PROMPT), ["a"], 0.0).num_hit_tokens == 36


def test_a_request_that_wants_its_prompts_logprobs_hits_nothing() -> None:
    views = table(a=0)
    views.update("a", report(1, added=hashes(*PROMPT)), 0.0)
    assert views.route(request("r", *PROMPT, uses_cache=False), ["a"], 0.0).num_hit_tokens == 0


def test_what_was_just_sent_counts_until_a_report_counts_it() -> None:
    views = table(a=0, b=30)
    assert views.route(request("r1", *PROMPT), ["a", "b"], 0.0).replicas[0] == "a"
    other = [100 + token for token in PROMPT]
    assert views.route(request("r2", *other), ["a", "b"], 0.0).seconds == (30 + 40) / 100
    views.admitted("r1")
    views.update("a", report(1, queued=5), 0.0)
    views.update("b", report(1, queued=1000), 0.0)
    route = views.route(request("r3", *[200 + token for token in PROMPT]), ["a", "b"], 0.0)
    assert (route.replicas[0], route.seconds) == ("a", (5 + 40) / 100)


def test_what_was_just_sent_is_a_prefix_for_the_next() -> None:
    """A burst of equal prompts is computed once."""
    views = table(a=0, b=0)
    first = views.route(request("r1", *PROMPT), ["a", "b"], 0.0).replicas[0]
    route = views.route(request("r2", *PROMPT[:36], 99, 99, 99), ["a", "b"], 0.0)
    assert (route.replicas[0], route.num_hit_tokens) == (first, 36)
    views.settled("r1")
    views.settled("r2")
    assert views.route(request("r3", *PROMPT), ["a", "b"], 0.0).num_hit_tokens == 0


def test_new_prefixes_of_an_idle_service_are_spread() -> None:
    views = table(a=0, b=0, c=0)
    chosen = []
    for index in range(6):
        route = views.route(request(f"r{index}", *(1000 * index + token for token in range(40))), NAMES, float(index))
        views.settled(f"r{index}")
        for name in NAMES:
            views.update(name, report(index + 1), float(index))
        chosen.append(route.replicas[0])
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]


def test_a_hot_prefix_is_passed_on_before_its_holder_has_more_than_its_share() -> None:
    views = table(a=0, b=0, c=0)
    held: dict[str, set[bytes]] = {name: set() for name in NAMES}
    counts = dict.fromkeys(NAMES, 0)
    for index in range(300):
        chosen = views.route(request(f"r{index}", *PROMPT), NAMES, index / 10).replicas[0]
        views.settled(f"r{index}")
        counts[chosen] += 1
        for name in NAMES:
            added = [each for each in hashes(*PROMPT) if name == chosen and each not in held[name]]
            held[name].update(added)
            views.update(name, report(index + 1, added=added), index / 10)
    assert max(counts.values()) < 1.3 * 100


def test_old_views_have_no_say() -> None:
    views = table(a=0, b=0)
    views.update("a", report(1, added=hashes(*PROMPT)), 0.0)
    views.update("b", report(1), 2.0)
    assert views.route(request("r", *PROMPT), ["a", "b"], MAX_AGE).replicas[0] == "a"
    assert views.route(request("r", *PROMPT), ["a", "b"], MAX_AGE + 0.1).replicas == ["b"]
    route = views.route(request("r", *PROMPT), ["a", "b"], 10.0)
    assert (route.reason, route.replicas) == ("stale", [])


def test_a_replica_that_has_just_started_is_empty_and_as_fast_as_the_fastest() -> None:
    views = table(a=500)
    route = views.route(request("r", *PROMPT), ["a", "new"], 0.0)
    assert (route.replicas[0], route.seconds, route.reason) == ("new", 0.4, "least_work")
    both = RoutingTable(MAX_AGE)
    assert both.route(request("r1", *PROMPT), ["x", "y"], 0.0).replicas[0] == "x"
    assert both.route(request("r2", *(token + 50 for token in PROMPT)), ["x", "y"], 0.0).replicas[0] == "y"


def test_an_engine_that_recovers_is_the_last_choice() -> None:
    views = table(a=0, b=300)
    views.update("a", report(1, rate=0.0), 0.0)
    assert views.route(request("r", *PROMPT), ["a", "b"], 0.0).replicas == ["b", "a"]
    assert views.route(request("r", *PROMPT), ["a"], 0.0).seconds == math.inf


def test_a_missed_report_is_noticed_and_a_snapshot_mends_it() -> None:
    views = table(a=0)
    assert not views.update("a", report(2, added=hashes(*PROMPT)), 0.0)
    assert not views.update("a", report(3), 0.0)
    assert views.route(request("r", *PROMPT), ["a"], 0.0).reason == "stale"
    assert views.update("a", report(3, added=hashes(*PROMPT[:8]), snapshot=True), 0.0)
    assert views.route(request("r", *PROMPT), ["a"], 0.0).num_hit_tokens == 8


def test_a_lost_replica_takes_what_was_known_of_it_along() -> None:
    views = table(a=0, b=0)
    first = views.route(request("r", *PROMPT), ["a", "b"], 0.0).replicas[0]
    views.lost(first, 0.0)
    views.admitted("r")
    views.settled("r")
    views.keep([first])
    route = views.route(request("r", *PROMPT), [first], 30.0)
    assert (route.reason, route.num_hit_tokens) == ("least_work", 0)


def test_a_lost_replica_is_not_asked_until_it_reports_or_was_given_time() -> None:
    def chosen(back: bool, now: float) -> list[str]:
        views = table(a=0, b=900)
        views.lost("a", 0.0)
        views.update("b", report(1, queued=900), now)
        if back:
            views.update("a", report(7, snapshot=True), now)
        return views.route(request("r", *PROMPT), ["a", "b"], now).replicas

    assert chosen(False, 1.0) == chosen(False, 29.0) == ["b"]
    assert chosen(False, 30.0) == chosen(True, 1.0) == ["a", "b"]


def test_who_does_not_answer_a_request_is_not_asked_for_it_again() -> None:
    """An engine that stands still looks like one that has just started."""
    views = table(b=900)
    assert views.route(request("r", *PROMPT), ["a", "b"], 0.0).replicas == ["a", "b"]
    views.update("b", report(1, queued=900), 2.0)
    assert views.route(request("r", *PROMPT), ["a", "b"], 2.0).replicas == ["b"]
    assert views.route(request("other", *PROMPT), ["a", "b"], 2.0).replicas == ["b"]
    assert views.route(request("r", *PROMPT), ["a"], 2.0).reason == "stale"
    views.update("a", report(0, snapshot=True), 3.0)
    assert views.route(request("r", *PROMPT), ["a", "b"], 3.0).replicas == ["a", "b"]


def test_a_request_that_its_replica_took_and_lost_says_nothing_against_it() -> None:
    views = table(a=0, b=900)
    for name in ("first", "again"):
        assert views.route(request(name, *PROMPT), ["a", "b"], 1.0).replicas[0] == "a"
        if name == "first":
            views.admitted(name)
        assert views.update("a", report(1, snapshot=True), 1.5)
        assert views.route(request(name, *PROMPT), ["a", "b"], 1.5).replicas[0] == "a"
        views.settled(name)


def test_a_request_that_nobody_answers_is_not_counted_for_ever() -> None:
    """It may be routed after its client has left: then nothing settles it."""
    views = table(a=0)
    for index, now in enumerate((0.0, 5.0, 9.0, 11.0)):
        if index == 0:
            views.route(request("left", *PROMPT), ["a"], now)
        assert views.update("a", report(index + 1), now)
        seconds = views.route(request("r", *(token + 50 for token in PROMPT)), ["a"], now).seconds
        views.settled("r")
        assert seconds == (0.4 if now > 10 else 0.8)
    assert not views._replica_of


# Against a reference


@dataclass
class Slow:
    """One replica, as obvious as can be: lists of tokens, and everything counted anew."""

    prefixes: set[tuple[int, ...]] = field(default_factory=set)
    queued: int = 0
    rate: float = 100.0
    sent: dict[str, tuple[tuple[int, ...], int, bool]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)

    def hit(self, prompt: tuple[int, ...]) -> int:
        known = set(self.prefixes)
        for other, _, _ in self.sent.values():
            known |= {other[:end] for end in range(BLOCK, len(other) + 1, BLOCK)}
        num_hit = 0
        while num_hit + BLOCK < len(prompt) and prompt[: num_hit + BLOCK] in known:
            num_hit += BLOCK
        return num_hit

    def seconds(self, prompt: tuple[int, ...]) -> float:
        work = self.queued + sum(tokens for _, tokens, _ in self.sent.values())
        return (work + len(prompt) - self.hit(prompt)) / self.rate

    def share(self, now: float) -> float:
        return 30 + sum(0.5 ** ((now - at) / 30) for at in self.times)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
actions = st.one_of(
    st.tuples(st.just("send"), prompts),
    st.tuples(st.just("report"), st.sampled_from(NAMES), st.integers(0, 60), st.sampled_from([50.0, 100.0, 130.0]),
              st.lists(prompts, max_size=3)),
    st.tuples(st.just("admit"), st.integers(0, 30)),
    st.tuples(st.just("settle"), st.integers(0, 30)),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(actions, max_size=40))
def test_against_a_slow_reference(script: list[tuple[object, ...]]) -> None:
    views, slow = table(a=0, b=0, c=0), {name: Slow() for name in NAMES}
    sequence = dict.fromkeys(NAMES, 0)
    for index, (what, *rest) in enumerate(script):
        now = 0.05 * index
        if what == "send":
            prompt: tuple[int, ...] = rest[0]  # type: ignore[assignment]
            shares = {name: replica.share(now) for name, replica in slow.items()}
            mean = sum(shares.values()) / 3
            cost = {
                name: replica.seconds(prompt)
                + (len(prompt) - replica.hit(prompt) + 10 * max(0, shares[name] / mean - 1.1) * len(prompt))
                / replica.rate
                for name, replica in slow.items()
            }
            route = views.route(request(f"r{index}", *prompt), NAMES, now)
            chosen = route.replicas[0]
            assert cost[chosen] <= min(cost.values()) * 1.1 + 1e-9
            assert math.isclose(route.seconds, slow[chosen].seconds(prompt))
            assert route.num_hit_tokens == slow[chosen].hit(prompt)
            assert (route.reason == "hit") == (slow[chosen].hit(prompt) > 0)
            tokens = len(prompt) - slow[chosen].hit(prompt)
            slow[chosen].sent[f"r{index}"] = (prompt, tokens, False)
            slow[chosen].times.append(now)
        elif what == "report":
            name, queued, rate, held = rest
            replica = slow[name]  # type: ignore[index]
            new = {each[:end] for each in held for end in range(BLOCK, len(each) + 1, BLOCK)}  # type: ignore[attr-defined]
            added = [hashes(*each)[-1] for each in new - replica.prefixes]
            removed = [hashes(*each)[-1] for each in replica.prefixes - new]
            sequence[name] += 1  # type: ignore[index]
            made = report(sequence[name], added=added, removed=removed, queued=queued, rate=rate)  # type: ignore[index, arg-type]
            assert views.update(name, made, now)  # type: ignore[arg-type]
            replica.prefixes, replica.queued, replica.rate = new, queued, rate  # type: ignore[assignment]
            replica.sent = {key: (each, 0 if admitted else tokens, admitted)
                            for key, (each, tokens, admitted) in replica.sent.items()}  # fmt: skip
        else:
            name = f"r{rest[0]}"
            (views.admitted if what == "admit" else views.settled)(name)
            for replica in slow.values():
                if name in replica.sent and what == "settle":
                    del replica.sent[name]
                elif name in replica.sent:
                    replica.sent[name] = (*replica.sent[name][:2], True)
