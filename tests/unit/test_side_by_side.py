"""Runs of two servers in turn: the order, continuing, disturbed runs, ratios, the curve and the targets."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine, side_by_side
from benchmarks.comparison import MIN_PAIRS, QUANTITIES, TTFT, Pair, curve_at, ratios, report
from benchmarks.errors import BenchmarkError
from benchmarks.machine import CpuWatch, cores_used_by
from benchmarks.run_book import RunBook
from benchmarks.workloads import NAMES, TokenIds, build

# Figures of scripted runs


def w1(ttft: float, gap: float, other_cores: float = 0.0) -> dict[str, Any]:
    return {
        "long": {"ttft_ms": {"p50": ttft}},
        "steady_itl_during_long_prefill_ms": {"p99": gap},
        "steady_itl_otherwise_ms": {"p50": 10.0},
        "other_cores": other_cores,
        "wall_s": 11.0,
        "errors": 0,
    }


def w4(ms_a_token: float, other_cores: float = 0.0) -> dict[str, Any]:
    req = {"tpot_ms": {"p50": ms_a_token}, "ttft_ms": {"p50": 50.0}}
    return {"req": req, "other_cores": other_cores, "wall_s": 4.0, "errors": 0}


def w2(tokens_a_second: float) -> dict[str, Any]:
    req = {"itl_ms": {"p50": 40.0}}
    return {"output_tok_s": tokens_a_second, "req": req, "other_cores": 0.0, "wall_s": 17.0, "errors": 0}


W4_TOKEN = next(quantity for quantity in QUANTITIES if quantity.label == "ms a token")


# Ratios and targets


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    pairs = [Pair(w4(10), w4(20)), Pair(w4(40), w4(80)), Pair(w4(30), w4(20))]
    assert ratios(W4_TOKEN, pairs) == [0.5, 0.5, 1.5]
    text, good = report({("W4", 512): pairs}, "peer", with_targets=True)
    assert "0.5 (0.5 to 1.5)" in text
    assert "30 (10 to 40)" in text
    assert not good  # 30 ms are above what it may take by itself
    assert f"3 pairs, {MIN_PAIRS} wanted" in text


def test_a_target_is_met_at_its_bound_and_missed_above() -> None:
    at_bound = [Pair(w4(13.0), w4(20.0))] * 5
    text, good = report({("W4", 512): at_bound}, "peer", with_targets=True)
    assert good
    assert "wanted" not in text
    assert not report({("W4", 512): [Pair(w4(13.1), w4(20.0))] * 5}, "peer", with_targets=True)[1]
    assert not report({("W4", 512): [Pair(w4(22.1), w4(200.0))] * 5}, "peer", with_targets=True)[1]
    assert report({("W2", 512): [Pair(w2(250), w2(200))] * 5}, "peer", with_targets=True)[1]
    assert not report({("W2", 512): [Pair(w2(249), w2(200))] * 5}, "peer", with_targets=True)[1]


def test_gap_and_ttft_have_targets_at_256_only() -> None:
    alike = [Pair(w1(1000, 300), w1(1000, 300))]
    assert report({("W1", 128): alike}, "peer", with_targets=True)[1]
    text, good = report({("W1", 256): alike}, "peer", with_targets=True)
    assert not good
    assert text.count("MISS") == 2


def test_without_targets_there_is_the_table_only() -> None:
    text, good = report({("W4", 512): [Pair(w4(90), w4(20))]}, "another", with_targets=False)
    assert good
    assert "MISS" not in text
    assert "another" in text


def test_disturbed_pairs_are_left_out_and_counted() -> None:
    pairs = [Pair(w4(10), w4(20)), Pair(w4(90, other_cores=0.5), w4(20)), Pair(w4(10), w4(900, other_cores=0.2))]
    text, good = report({("W4", 512): pairs}, "peer", with_targets=True)
    assert good
    assert "W4 at 512: 2 of 3 pairs left out" in text


def test_nothing_counted_meets_no_target() -> None:
    pairs = [Pair(w4(10, other_cores=1.0), w4(20))]
    assert not report({("W4", 512): pairs}, "peer", with_targets=True)[1]


# The curve


def test_the_curve_between_beside_and_beyond_its_points() -> None:
    points = [(500.0, 400.0), (1000.0, 100.0), (700.0, 600.0), (2000.0, 150.0)]  # the last two are no use
    assert curve_at(points, 499.0) == math.inf
    assert curve_at(points, 500.0) == 400.0
    assert curve_at(points, 750.0) == 250.0
    assert curve_at(points, 1000.0) == 100.0
    assert curve_at(points, 5000.0) == 100.0
    assert curve_at([], 1.0) == math.inf


@given(
    st.lists(st.tuples(st.integers(1, 50).map(float), st.integers(1, 50).map(float)), min_size=1, max_size=6),
    st.lists(st.integers(0, 60).map(float), min_size=2, max_size=8),
)
def test_a_longer_wait_never_allows_a_larger_gap(points: list[tuple[float, float]], waits: list[float]) -> None:
    gaps = [curve_at(points, wait) for wait in sorted(waits)]
    assert gaps == sorted(gaps, reverse=True)
    for ttft, gap in points:
        assert curve_at(points, ttft) <= gap
        assert curve_at(points, ttft) >= min(other for _, other in points)


def test_ours_must_lie_below_the_whole_curve() -> None:
    peers = {128: w1(2400, 236), 256: w1(1770, 382), 512: w1(1524, 614)}
    below = {128: w1(1500, 150), 256: w1(1200, 200), 512: w1(1100, 600)}
    above = {**below, 512: w1(1600, 560)}
    for ours, expected in ((below, 0), (above, 1)):
        found = {("W1", budget): [Pair(ours[budget], peers[budget])] * 5 for budget in peers}
        text, good = report(found, "peer", with_targets=True)
        assert text.count("MISS") == expected
        assert good == (expected == 0)
    assert TTFT.of(below[128]) == 1500


# The book


def test_a_book_is_continued_and_refuses_another_comparison(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    book = RunBook(path, {"peer": "a"})
    book.add_run("W4", 512, 0, "ours", w4(1))
    book.add_start("ours", 512, 3.0, 0.1)
    again = RunBook(path, {"peer": "a"})
    assert again.seed == book.seed
    assert again.has_run("W4", 512, 0, "ours")
    assert not again.has_run("W4", 512, 1, "ours")
    assert again.run("W4", 512, 0, "ours") == w4(1)
    assert json.loads(path.read_text())["starts"] == [
        {"server": "ours", "budget": 512, "seconds": 3.0, "idle_cores": 0.1}
    ]
    with pytest.raises(BenchmarkError, match="holds runs of"):
        RunBook(path, {"peer": "b"})


# The order of runs


class Rig:
    """Servers that only note what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.up: list[str] = []  # by process id
        self.paused: list[str] = []
        self.log: list[str] = []
        self.other_cores: list[float] = []
        self.out = tmp_path / "runs.json"
        self.fail_at: int | None = None

        @contextmanager
        def server(name: str) -> Iterator[str]:
            self.up.append(name)
            self.log.append(f"+{name}")
            try:
                yield name
            finally:
                self.log.append(f"-{name}")
                self.up.remove(name)

        @contextmanager
        def paused(pid: int) -> Iterator[None]:
            self.paused.append(self.up[pid])
            try:
                yield
            finally:
                self.paused.pop()

        async def run(server: Any, workload: str, prompts: object, seed: int) -> dict[str, Any]:
            assert self.paused == [name for name in self.up if name != server.name]
            if self.fail_at is not None and len([line for line in self.log if " " in line]) == self.fail_at:
                raise BenchmarkError("a request failed")
            self.log.append(f"{server.url} {workload} {seed % 1_000_000}")
            summary = {"W1": w1(100, 10), "W2": w2(250), "W4": w4(10)}[workload]
            if server.url == "vllm":
                summary = {"W1": w1(1000, 100), "W2": w2(200), "W4": w4(20)}[workload]
            return {**summary, "other_cores": self.other_cores.pop() if self.other_cores else 0.0}

        async def warm_up(server: Any, prompts: object) -> None:
            assert self.paused == [name for name in self.up if name != server.name]

        monkeypatch.setattr(side_by_side, "running_service", lambda settings: server("ours"))
        monkeypatch.setattr(side_by_side, "running_peer", lambda peer, model, budget: server(peer.name))
        monkeypatch.setattr(side_by_side, "_run", run)
        monkeypatch.setattr(side_by_side, "_warm_up", warm_up)
        monkeypatch.setattr(side_by_side, "children", lambda: set(range(len(self.up))))
        monkeypatch.setattr(side_by_side, "paused", paused)
        for name in ("SETTLE_SECONDS", "IDLE_AFTER_SECONDS"):
            monkeypatch.setattr(side_by_side, name, 0.0)
        monkeypatch.setattr(side_by_side, "cores_used_by", lambda process, seconds: 0.0)
        self.model = tmp_path

    def main(self, *arguments: str) -> int:
        """Run the command; what it did is in `log`, seeds counted from the book's own."""
        self.log.clear()
        return side_by_side.main([*arguments, "--model", str(self.model), "--out", str(self.out)])

    def runs(self) -> list[str]:
        return [line.rsplit(" ", 1)[0] for line in self.log if " " in line]

    def seeds(self) -> list[str]:
        return [line.rsplit(" ", 1)[1] for line in self.log if " " in line]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    class Store:
        def resolve(self, path: str) -> Any:
            class Stored:
                directory = Path(path)

            return Stored

    monkeypatch.setattr(side_by_side, "open_store", lambda say: Store())
    return Rig(monkeypatch, tmp_path)


def test_servers_take_turns_and_change_places(rig: Rig) -> None:
    assert rig.main("-w", "W4", "--rounds", "3") == 0
    assert rig.runs() == ["ours W4", "vllm W4", "vllm W4", "ours W4", "ours W4", "vllm W4"]
    seeds = rig.seeds()
    assert seeds[0::2] == seeds[1::2]  # the same prompts in a pair,
    assert len(set(seeds)) == 3  # others in every round
    assert [line for line in rig.log if " " not in line] == ["+ours", "+vllm", "-vllm", "-ours"]


def test_every_budget_has_its_own_servers(rig: Rig) -> None:
    assert rig.main("-w", "W1", "-w", "W4", "--budget", "128,512", "--rounds", "1") == 0
    assert rig.runs() == ["ours W1", "vllm W1", "ours W1", "vllm W1", "ours W4", "vllm W4"]
    assert [line for line in rig.log if " " not in line] == ["+ours", "+vllm", "-vllm", "-ours"] * 2


def test_a_command_cut_short_is_continued(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.fail_at = 3
    with pytest.raises(BenchmarkError, match="a request failed"):
        rig.main("-w", "W4", "--rounds", "3")
    assert rig.up == []
    first = rig.seeds()
    rig.fail_at = None
    assert rig.main("-w", "W4", "--rounds", "3") == 0
    assert rig.runs() == ["vllm W4", "ours W4", "ours W4", "vllm W4"]  # the pair that was not complete, whole
    assert rig.seeds()[0] == first[2]
    assert rig.main("-w", "W4", "--rounds", "3") == 0
    assert rig.log == []
    assert "W4, 512, ms a token" in capsys.readouterr().out


def test_a_disturbed_run_is_repeated_with_other_prompts(rig: Rig) -> None:
    rig.other_cores = [0.0, 0.9]
    assert rig.main("-w", "W4", "--rounds", "1") == 0
    assert rig.runs() == ["ours W4", "ours W4", "vllm W4"]
    assert len(set(rig.seeds())) == 2
    assert RunBook(rig.out, json.loads(rig.out.read_text())["same"]).run("W4", 512, 0, "ours")["other_cores"] == 0.0


def test_a_run_that_stays_disturbed_is_left_out_and_made_again_by_the_next_command(rig: Rig) -> None:
    rig.other_cores = [0.7, 0.8, 0.9]
    assert rig.main("-w", "W4", "--rounds", "1") == 1
    assert rig.runs() == ["ours W4"] * 3 + ["vllm W4"]
    assert rig.main("-w", "W4", "--rounds", "1") == 0
    assert rig.runs() == ["ours W4", "vllm W4"]


def test_a_missed_target_is_the_exit_code(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "report", lambda pairs, title, with_targets: ("", False))
    assert rig.main("-w", "W4", "--rounds", "1") == 1


def test_workloads_with_one_seed_share_no_beginning() -> None:
    firsts = {tuple(build(name, TokenIds(), 5).requests[0].prompt[:16]) for name in NAMES}
    assert len(firsts) == len(NAMES)


# The machine


def test_other_cores_are_what_is_busy_beyond_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy, own = [100.0], [50.0], [{1: 10.0, 2: 5.0}]
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: busy[0])
    monkeypatch.setattr(machine, "_own_seconds", lambda: own[0])
    watch = CpuWatch()
    clock[0], busy[0], own[0] = 110.0, 62.0, {1: 14.0, 3: 3.0}  # 2 ended; 3 is new
    assert watch.other_cores() == pytest.approx((12.0 - 4.0 - 3.0) / 10.0)
    busy[0] = 50.0
    assert watch.other_cores() == 0.0  # clocks of different grain


def test_a_paused_tree_does_nothing_until_it_goes_on() -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        while not machine.psutil.Process(process.pid).children():
            pass
        with machine.paused(process.pid):
            assert cores_used_by(process.pid, 0.3) == 0.0
        assert any(cores_used_by(process.pid, 0.3) > 0.05 for _ in range(40))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@pytest.mark.parametrize(("code", "busy"), [("while True: pass", True), ("import time; time.sleep(600)", False)])
def test_cores_used_by_a_process_tree(code: str, busy: bool) -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        while not machine.psutil.Process(process.pid).children():
            pass
        # More than once: at first it sees Python start, and a busy machine lets it wait.
        assert any((cores_used_by(process.pid, 0.5) > 0.05) == busy for _ in range(40))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
