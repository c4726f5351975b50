"""What faults cost, trial by trial: written down, continued, and read as a table."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.scenes import SCENES
from benchmarks.service_processes import FaultError
from benchmarks.summary import spread_of, table


@dataclass(frozen=True, slots=True)
class Trial:
    """What one fault cost."""

    failed: int
    """Streams with an error, or without an end. One that must fail counts when it does not, or says something else."""
    changed: int
    """Streams whose text or number of tokens is not that of the undisturbed run, as far as it came."""
    longest_gap: float
    """Seconds without a token, of the stream that waited longest; from sending to the first token counts too. Streams
    that the fault is meant for are left out.
    """
    unhealthy_after: float | None
    """Seconds from the fault to the first /health that is not good; None: it was good all the time."""
    recoveries: int
    """Restarts of an engine's ranks, by the service's own count."""
    lost_engines: int
    """Of those that should serve on, the ones that do not."""
    note: str
    errors: list[str]


class Book:
    """Trials by scene and index, in a JSON file or, without a path, in memory."""

    def __init__(self, path: Path | None, same: dict[str, Any]) -> None:
        """Raises FaultError when the file holds trials of another load than `same`."""
        self._path, self._same = path, same
        self.trials: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            content = json.loads(path.read_text())
            if content["same"] != same:
                raise FaultError(f"{path} holds trials of {content['same']}, and not of {same}")
            self.trials = content["trials"]

    def add(self, name: str, index: int, trial: Trial) -> None:
        self.trials.setdefault(name, {})[str(index)] = asdict(trial)
        if self._path is not None:
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text(json.dumps({"same": self._same, "trials": self.trials}, indent=1))
            os.replace(new, self._path)


def report(book: Book) -> bool:
    """Print the table; whether every trial was good."""
    rows, good = [], True
    for name, trials in book.trials.items():
        scene, runs = SCENES[name], list(trials.values())
        gaps = [round(run["longest_gap"], 2) for run in runs]
        seen = [round(run["unhealthy_after"], 2) for run in runs if run["unhealthy_after"] is not None]
        failed, changed, lost = (sum(run[key] for run in runs) for key in ("failed", "changed", "lost_engines"))
        fine = not failed and not changed and not lost and max(gaps) <= scene.limit
        good &= fine
        counted = spread_of([run["recoveries"] for run in runs])
        verdict = "ok" if fine else "MISS"
        unhealthy = spread_of(seen) if seen else "-"
        rows.append([name, len(runs), failed, changed, counted, spread_of(gaps), scene.limit, unhealthy, verdict])
    header = ["fault", "trials", "failed", "changed", "recoveries", "longest gap, s", "limit", "unhealthy after, s"]
    print(table([*header, ""], rows))
    return good
