"""What preflight says of nodes that differ, do not answer or are not reached; by probes that are no actors."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from cluster.preflight import nodes
from cluster.preflight.node_probe import NodeProbe, dial, versions
from cluster.preflight.nodes import Probes
from cluster.preflight.row import Row, lines


class FakeRay:
    """Calls are functions, made when their result is asked for."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> None:
        assert 0 < len(calls) == num_returns  # Ray takes no empty list

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        return call()

    def kill(self, probe: Any) -> None:
        self.killed.append(probe)


class Remote:
    """A probe whose methods answer as told: a value, or an error to raise."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *_: Any) -> Callable[[], Any]:
        def answer() -> Any:
            if isinstance(self._answers["value"], Exception):
                raise self._answers["value"]
            return self._answers["value"]

        return answer


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(nodes, "ray", fake)
    return fake


def probes(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Probes:
    """One a node; the head is node a."""
    rows = [
        {"NodeID": name * 8, "NodeManagerAddress": f"10.0.0.{name}", "Resources": {"node:__internal_head__": 1.0}}
        if name == "a"
        else {"NodeID": name * 8, "NodeManagerAddress": f"10.0.0.{name}", "Resources": {}}
        for name in answers
    ]
    monkeypatch.setattr(nodes, "living_nodes", lambda: rows)
    monkeypatch.setattr(nodes, "_place", lambda node_id: Remote(value=answers[node_id[0]]))
    return Probes()


A, B = "10.0.0.a (aaaaaa)", "10.0.0.b (bbbbbb)"


def test_a_node_of_another_version_is_told_with_both(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> None:
    found = probes(monkeypatch, a=versions(), b=versions() | {"torch": "1.0", "chunkserve": "missing"})
    found.check_versions()
    here = versions()
    assert [row.state for row in found.rows] == ["ok", "failed"]
    expected = f"torch 1.0 (here: {here['torch']}), chunkserve missing (here: {here['chunkserve']})"
    assert found.rows[1] == Row("versions", B, "failed", expected)
    found.close()
    assert len(ray.killed) == 2


def test_a_node_without_an_answer_is_told_and_asked_no_more(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> None:
    found = probes(monkeypatch, a=GetTimeoutError(), b=ActorDiedError())
    found.check_versions()
    assert found.rows[0] == Row("versions", A, "failed", "no answer within 60 s")
    assert found.rows[1].where == B
    assert "ActorDiedError" in found.rows[1].detail
    found.check_links()
    found.check_model("/m")
    assert len(found.rows) == 2
    assert len(ray.killed) == 2


def test_a_model_that_a_node_lacks(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> None:
    found = probes(monkeypatch, a=True, b=False)
    found.check_model("/models/x")
    assert found.rows[0] == Row("model", A, "ok", "/models/x")
    assert (found.rows[1].state, found.rows[1].detail.partition(";")[0]) == ("failed", "not at /models/x")


def test_only_the_head_is_asked_for_the_servers_port(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> None:
    found = probes(monkeypatch, a="server.port 80 is in use", b="never asked")
    found.check_server_port("0.0.0.0", 80)
    assert found.rows == [Row("server port", A, "failed", "server.port 80 is in use")]


def test_nodes_that_are_not_reached_are_named(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> None:
    found = probes(monkeypatch, a=None, b=None)
    listening = {A: ("10.0.0.a", 5), B: ("10.0.0.b", 6)}
    dialled = {A: [0.001, "timed out"], B: [0.002, 0.0005]}
    monkeypatch.setattr(found, "_ask", lambda _, method, *args: listening if method == "listen" else dialled)
    found.check_links()
    assert found.rows[0].state == "failed"
    assert found.rows[0].detail.startswith(f"not reached: {B} at 10.0.0.b:6: timed out; all TCP ports")
    assert found.rows[1] == Row("links", B, "ok", "2 nodes reached, the slowest in 2.0 ms")


def test_dialling() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        seconds, refused = NodeProbe().dial([address, ("127.0.0.1", 1)])
        assert isinstance(seconds, float)
        assert isinstance(refused, str)
        assert "refused" in refused
        assert NodeProbe().port_problem("127.0.0.1", address[1]).startswith(f"server.port {address[1]} is in use")
    assert isinstance(dial(address), str)
    assert NodeProbe().port_problem("127.0.0.1", address[1]) == ""


def test_the_table_keeps_its_columns() -> None:
    rows = [Row("versions", "a", "ok", "all"), Row("links", "long name", "failed", "b at 1: no")]
    assert lines(rows) == [
        "check     where      state   what was found",
        "versions  a          ok      all",
        "links     long name  failed  b at 1: no",
    ]
