"""The runs of a comparison, written down one by one, so that a command cut short can be continued."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.summary import Summary


class RunBook:
    """Runs by workload, budget, round and server, in a JSON file or, without a path, in memory."""

    def __init__(self, path: Path | None, same: Mapping[str, Any]) -> None:
        """Opens the file, if there is one. Raises BenchmarkError when what was compared then is not `same`."""
        self._path = path
        self._content: dict[str, Any] = {"same": dict(same), "seed": time.time_ns() // 1000, "starts": [], "runs": {}}
        if path is not None and path.exists():
            self._content = json.loads(path.read_text())
            if self._content["same"] != dict(same):
                raise BenchmarkError(f"{path} holds runs of {self._content['same']}, and not of {dict(same)}")

    @property
    def seed(self) -> int:
        """Of the prompts, the same for all commands on one book."""
        return int(self._content["seed"])

    def has_run(self, workload: str, budget: int, index: int, server: str) -> bool:
        """Whether this server did that round."""
        return _key(workload, budget, index, server) in self._content["runs"]

    def run(self, workload: str, budget: int, index: int, server: str) -> Summary:
        """Raises KeyError when there is no such run."""
        summary: Summary = self._content["runs"][_key(workload, budget, index, server)]
        return summary

    def add_run(self, workload: str, budget: int, index: int, server: str, summary: Summary) -> None:
        """Write a run down; it replaces an earlier one."""
        self._content["runs"][_key(workload, budget, index, server)] = summary
        self._save()

    def add_start(self, server: str, budget: int, seconds: float, idle_cores: float) -> None:
        """Write down that a server was started, how long that took, and what it uses when idle."""
        start = {"server": server, "budget": budget, "seconds": round(seconds, 2), "idle_cores": round(idle_cores, 4)}
        self._content["starts"].append(start)
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text(json.dumps(self._content, indent=1))
            os.replace(new, self._path)


def _key(workload: str, budget: int, index: int, server: str) -> str:
    return f"{workload}/{budget}/{index}/{server}"
