"""What real.py has to measure, and what it has measured: a file of JSON lines.

A record is added when its measurement is over, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from json_lines import JsonLines

REFERENCE = -1  # a turn that is not timed: plain vLLM says how sure it is of each token
VISITS = 2  # engine starts of a side, so that sides take turns
MEASURED, FAILED, SKIPPED = "measured", "failed", "skipped"
# Seconds, as long as nothing of the kind was measured.
_START_S, _JOB_S = 60.0, 20.0

Key = tuple[int, int, str, float, str, int]


@dataclass(frozen=True)
class Cell:
    """A workload. `context` counts prompt and answer together."""

    requests: int
    context: int
    prompt: str
    temperature: float

    def __str__(self) -> str:
        size = f"{self.requests} x {self.context}"
        return f"{size}, {self.prompt}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Job:
    """One measurement of a cell on one side."""

    cell: Cell
    side: str
    turn: int

    @property
    def key(self) -> Key:
        cell = self.cell
        return cell.requests, cell.context, cell.prompt, cell.temperature, self.side, self.turn

    def record(self, status: str, **more: Any) -> dict[str, Any]:
        return asdict(self.cell) | {"side": self.side, "turn": self.turn, "status": status} | more

    @staticmethod
    def of(record: dict[str, Any]) -> Job:
        names = ("requests", "context", "prompt", "temperature")
        return Job(Cell(*(record[name] for name in names)), record["side"], record["turn"])


@dataclass(frozen=True)
class Visit:
    """Jobs that one engine process serves, in this order."""

    side: str
    number: int
    jobs: tuple[Job, ...]


def plan(
    cells: Sequence[Cell], sides: Sequence[str], turns: int, most: int = VISITS
) -> list[Visit]:
    """Sides in turn. Each is started so often at most, and serves all cells and some turns."""
    visits, starts = [], min(most, turns)
    for number in range(starts):
        part = range(number * turns // starts, (number + 1) * turns // starts)
        for side in sides:
            jobs = []
            for turn, cell in itertools.product(part, cells):
                jobs.append(Job(cell, side, turn))
                if side == "plain" and turn == 0 and cell.temperature == 0:
                    jobs.append(Job(cell, side, REFERENCE))
            visits.append(Visit(side, number, tuple(jobs)))
    return visits


class Records(JsonLines):
    """Of jobs and of engines."""

    def jobs(self) -> list[dict[str, Any]]:
        """The latest record of each job."""
        latest = {Job.of(r).key: r for r in self.read() if "status" in r}
        return list(latest.values())

    def engines(self) -> list[dict[str, Any]]:
        return [record for record in self.read() if "engine" in record]

    def pending(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs without a record."""
        done = {Job.of(record).key for record in self.jobs()}
        return [job for job in jobs if job.key not in done]

    def forget_failures(self) -> None:
        """Failed jobs are pending again."""
        self.drop(FAILED)

    def start_seconds(self, side: str) -> float:
        """How long the engine of a side takes until it is ready, by what was seen."""
        engines = self.engines()
        own = [e["ready_s"] for e in engines if e["engine"] == side]
        return max(own or [e["ready_s"] for e in engines] or [_START_S])

    def job_seconds(self, cell: Cell) -> float:
        """How long a measurement of a cell takes, by what was seen of its size."""
        jobs = [record for record in self.jobs() if record["status"] == MEASURED]
        same = [
            r["wall_s"] for r in jobs
            if (r["requests"], r["context"]) == (cell.requests, cell.context)
        ]  # fmt: skip
        return 1.2 * max(same) if same else _JOB_S
