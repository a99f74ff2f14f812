"""What serving.py has to measure, and what it has measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from json_lines import JsonLines
from serving_load import ALL, Load

MEASURED, FAILED = "measured", "failed"
PLAIN, STOCK = "plain", "stock"
_JOB_S = 60.0  # as long as nothing was measured


@dataclass(frozen=True)
class Job:
    load: Load
    side: str
    turn: int

    def record(self, status: str, **more: Any) -> dict[str, Any]:
        told = {"load": self.load.name, "side": self.side, "turn": self.turn}
        return told | {"status": status} | more

    @staticmethod
    def of(record: dict[str, Any]) -> Job:
        return Job(Load(record["load"]), record["side"], record["turn"])


def plan(loads: Sequence[Load], sides: Sequence[str], turns: int) -> list[Job]:
    """Sides in turn, the other way round in every second turn. All at once comes first: shares are
    of what stock vLLM did then, or plain vLLM where only that is asked."""
    if any(load.share for load in loads) and not {STOCK, PLAIN} & set(sides):
        raise ValueError(f"loads in % need the side {STOCK} or {PLAIN}")
    wanted = list(loads)
    if any(load.share for load in loads):
        wanted = [Load(ALL), *wanted]
    wanted = sorted(dict.fromkeys(wanted), key=lambda load: load.name != ALL)
    jobs = []
    for turn, load in itertools.product(range(turns), wanted):
        order = sides if turn % 2 == 0 else sides[::-1]
        jobs += [Job(load, side, turn) for side in order]
    return jobs


class Records(JsonLines):
    """Of jobs and of servers."""

    def jobs(self) -> list[dict[str, Any]]:
        """The latest record of each job."""
        return list({Job.of(r): r for r in self.read() if "status" in r}.values())

    def servers(self) -> dict[str, dict[str, Any]]:
        """The latest start of each side."""
        return {record["server"]: record for record in self.read() if "server" in record}

    def pending(self, jobs: Iterable[Job]) -> list[Job]:
        done = {Job.of(record) for record in self.jobs()}
        return [job for job in jobs if job not in done]

    def most(self) -> float:
        """Requests a second that stock vLLM served when all came at once, or plain vLLM where there
        is no stock; 0: not measured."""
        jobs = self.jobs()
        side = STOCK if any(r["side"] == STOCK for r in jobs) else PLAIN
        found = [
            r["requests_per_s"]
            for r in jobs
            if (r["load"], r["side"], r["status"]) == (ALL, side, MEASURED)
        ]
        return statistics.median(found) if found else 0.0

    def job_seconds(self, load: Load) -> float:
        """How long a job takes, by what was seen of its load, or of any."""
        found = [r for r in self.jobs() if r["status"] == MEASURED]
        own = [r["wall_s"] for r in found if r["load"] == load.name]
        return 1.2 * max(own or [r["wall_s"] for r in found] or [_JOB_S])
