"""Every living node looked at from inside, by a probe on each."""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.errors import root_cause
from cluster.launch.cluster_nodes import living_nodes, node_name
from cluster.preflight.node_probe import DIAL_SECONDS, NodeProbe, versions
from cluster.preflight.row import Row

START_SECONDS = 60.0
"""For a process to start on every node."""
ASK_SECONDS = 10.0
_HEAD = "node:__internal_head__"


class Probes:
    """One probe a node. What goes wrong with a node becomes a row, and the node is left out from then on."""

    def __init__(self) -> None:
        self._nodes = living_nodes()
        self._probes: dict[str, Any] = {node_name(row): _place(row["NodeID"]) for row in self._nodes}
        self.rows: list[Row] = []
        """What was found so far."""

    def check_versions(self) -> None:
        """Each node has what this machine has. The first question to a probe: also whether it starts at all."""
        here = versions()
        for name, found in self._ask("versions", "versions", START_SECONDS).items():
            wrong = [
                f"{package} {found[package]} (here: {here[package]})"
                for package in here
                if found[package] != here[package]
            ]
            self._add("versions", name, ", ".join(wrong), ", ".join(f"{package} {v}" for package, v in found.items()))

    def check_model(self, directory: str) -> None:
        """Each node finds the model's files at the same place."""
        missing = f"not at {directory}; copy it there, or put it on a file system that all nodes share"
        for name, found in self._ask("model", "has_model", ASK_SECONDS, directory).items():
            self._add("model", name, "" if found else missing, directory)

    def check_server_port(self, host: str, port: int) -> None:
        """The head node, where the proxy will be, can listen there."""
        heads = [node_name(row) for row in self._nodes if _HEAD in row["Resources"]]
        for name, problem in self._ask("server port", "port_problem", ASK_SECONDS, host, port, only=heads).items():
            self._add("server port", name, problem, f"{host}:{port} is free")

    def check_links(self) -> None:
        """Each node reaches a free port of each node, itself included."""
        addresses = self._ask("links", "listen", ASK_SECONDS)
        targets = list(addresses.items())
        asked = self._ask("links", "dial", DIAL_SECONDS + ASK_SECONDS, [address for _, address in targets])
        for name, found in asked.items():
            failed = [
                f"{target} at {host}:{port}: {answer}"
                for (target, (host, port)), answer in zip(targets, found, strict=True)
                if isinstance(answer, str)
            ]
            problem = f"not reached: {'; '.join(failed)}; all TCP ports must be open between nodes" if failed else ""
            slowest = max((answer for answer in found if isinstance(answer, float)), default=0.0)
            self._add("links", name, problem, f"{len(targets)} nodes reached, the slowest in {1e3 * slowest:.1f} ms")

    def close(self) -> None:
        """End the probes."""
        for probe in self._probes.values():
            ray.kill(probe)

    def _ask(
        self, check: str, method: str, seconds: float, *args: Any, only: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Each node's answer to one question; nodes without one get a failed row."""
        calls = {
            name: getattr(probe, method).remote(*args)
            for name, probe in self._probes.items()
            if only is None or name in only
        }
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds)
        answers = {}
        for name, call in calls.items():
            try:
                answers[name] = ray.get(call, timeout=0)
            except GetTimeoutError:
                self._give_up(check, name, f"no answer within {seconds:g} s")
            except RayError as error:
                self._give_up(check, name, root_cause(error))
        return answers

    def _give_up(self, check: str, name: str, cause: str) -> None:
        self.rows.append(Row(check, name, "failed", cause))
        ray.kill(self._probes.pop(name))

    def _add(self, check: str, name: str, problem: str, detail: str) -> None:
        self.rows.append(Row(check, name, "failed" if problem else "ok", problem or detail))


def _place(node_id: str) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=place).remote()
