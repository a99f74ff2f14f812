"""How far a training has come that was broken off, from what it has left."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nwor_specpv.errors import NworError

from .plan import TrainingPlan

HEAD, RECORD, CARD = "eagle3.safetensors", "training.json", "eagle3.md"


@dataclass
class Progress:
    """At the latest measurement. The defaults are those of a run that begins."""

    head: Path | None = None
    cycle: int = 0  # that was running
    seconds: float = 0.0
    trained_seconds: float = 0.0
    trained_tokens: int = 0
    updates: int = 0
    written_tokens: int = 0
    ended: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)


def plan_record(plan: TrainingPlan) -> dict[str, Any]:
    """As it stands in the record."""
    return json.loads(json.dumps({**asdict(plan), "start": Path(plan.start).name}))


def read_progress(out: Path, plan: TrainingPlan) -> Progress:
    """Of the run in the folder `out`; raises if it had another plan. Its minutes may differ."""
    if not (out / RECORD).is_file() or not (out / HEAD).is_file():
        return Progress()
    try:
        record = json.loads((out / RECORD).read_text("utf-8"))
        before, last = dict(record["plan"]), record["measured"][-1]
        found = Progress(
            out / HEAD,
            **record["progress"],
            **{name: last[name] for name in ("trained_tokens", "updates", "written_tokens")},
            history=record["measured"],
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise NworError(
            f"resume: got {str(out / RECORD)!r}, which is no record that a run can go on from"
        ) from None
    for name, value in plan_record(plan).items():
        if name != "minutes" and before.get(name) != value:
            raise NworError(
                f"resume: got {name} {value!r}, expected {before.get(name)!r}, as in the run in "
                f"{str(out)!r}; leave --resume out to begin anew"
            )
    return found
