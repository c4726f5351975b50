"""`python -m benchmarks NAME`: every name runs, with the arguments after it."""

import socket
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES, main
from benchmarks.scheduler_cost import Round, checks_of


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_takes_its_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: {name}" in capsys.readouterr().out


def test_the_default_is_scheduler_cost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.scheduler_cost.SIZES", (1, 2))
    monkeypatch.setattr("benchmarks.scheduler_cost.NUM_STEPS", 3)
    monkeypatch.setattr("benchmarks.scheduler_cost.CHECKED_SIZE", 2)
    monkeypatch.setattr("benchmarks.scheduler_cost.LIMIT_MS", 1e6)
    monkeypatch.setattr("benchmarks.scheduler_cost.LIMIT_OF_LINEAR", 1e6)
    assert main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7
    monkeypatch.setattr("benchmarks.scheduler_cost.LIMIT_MS", 0.0)
    assert main([]) == 1


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert ", ".join(NAMES) in capsys.readouterr().err


def cost(vllm: float | None = None, **ours: float) -> Round:
    """Totals in milliseconds, ours by size and vLLM's at 256."""
    totals = {16: 0.05, 64: 0.2, 256: 0.8, 1024: 3.2} | {int(size[1:]): total for size, total in ours.items()}
    return Round(
        {size: (0.0, 0.0, total) for size, total in totals.items()}, {} if vllm is None else {256: (0.0, 0.0, vllm)}
    )


def test_the_targets_of_scheduler_cost() -> None:
    assert [good for _, good in checks_of([cost()])] == [True, True]
    assert [good for _, good in checks_of([cost(n256=0.81, n1024=4.1)])] == [False, False]
    assert [good for _, good in checks_of([cost(vllm=3.2)])] == [True, True, True]
    assert [good for _, good in checks_of([cost(vllm=3.1)])] == [True, True, False]
    one_slow_round = [cost(vllm=4.0), cost(vllm=4.0, n256=8.0, n1024=32.0), cost(vllm=4.0)]
    assert [good for _, good in checks_of(one_slow_round)] == [True, True, True]
    slow_for_both = [cost(vllm=40.0, n256=8.0)] * 2 + [cost(vllm=4.0)]
    assert [good for _, good in checks_of(slow_for_both)] == [False, True, True]


def test_what_cannot_be_made_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:  # bound and not listening: whoever connects is refused
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert main(["loadgen", "-w", "W4", "--base-url", url]) == 2
    assert f"loadgen: no model at {url}/v1/models" in capsys.readouterr().err
    assert main(["loadgen", "-w", "W4", "--tokenizer", str(tmp_path)]) == 2
    assert f"there is no {tmp_path}/tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["attention_speed", "--case", "32y8"], "'32y8' is no step"),
        (["attention_speed", "--case", "0+8"], "'0+8' is no step"),
        (["linear_speed", "--rows", "0"], "'0' is no whole number of at least 1"),
        (["sampling_speed", "--threads", "two"], "'two' is no whole number of at least 1"),
        (["survival", "--fault", "kill-worker=0"], "'0' is no whole number of at least 1"),
        (["survival", "--fault", "kill-nobody"], "no fault is called 'kill-nobody'"),
    ],
)
def test_an_option_that_cannot_be_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
