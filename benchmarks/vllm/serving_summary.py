"""From the records of serving.py to one result: a JSON file, a table in Markdown and a plot."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_records import MEASURED, PLAIN, STOCK, Records

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MEDIANS = (
    "tokens_per_s", "middle_tokens_per_s", "requests_per_s", "drafted", "accepted", "draft_rounds",
    "preemptions", "cached", "requests", "prompt_tokens", "tokens",
)  # fmt: skip
SPREADS = ("first_ms", "output_gap_ms", "token_ms", "whole_s", "cache_use", "running", "waiting")
RATIOS = {
    "tokens_per_s": ("tokens_per_s", ""),
    "first_ms": ("first_ms", "p50"),
    "token_ms": ("token_ms", "p50"),
    "token_ms_p99": ("token_ms", "p99"),
}


def identify(out: Path, told: dict[str, Any]) -> None:
    """Notes in the folder what is measured; a folder holds one run."""
    path = out / "run.json"
    known = json.loads(path.read_text()) if path.exists() else told
    other = [name for name, value in told.items() if known.get(name) != value]
    if other:
        name = other[0]
        raise SystemExit(
            f"{out} holds a run with {name} {known.get(name)!r}, not {told[name]!r}: "
            "choose another --out"
        )
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def write(out: Path, result: Path) -> int:
    """Writes the result, and the table and the plot beside the records."""
    told = summarise(json.loads((out / "run.json").read_text()), Records(out / "records.jsonl"))
    result.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    sys.path.insert(0, str(TOOLS))
    from tables import serving, serving_plot

    table = "\n".join(serving.result_lines(told)) + "\n"
    (out / "table.md").write_text(table, encoding="utf-8")
    (out / "plot.svg").write_text(serving_plot.render(told), encoding="utf-8")
    print(table, end="")
    return 0


def summarise(run: dict[str, Any], records: Records) -> dict[str, Any]:
    jobs, servers = records.jobs(), records.servers()
    first = next(iter(servers.values()), {})
    names = ("commit", "torch", "vllm", "device", "python")
    told = run | {name: first.get(name) for name in names}
    told["servers"] = {side: {"start_s": one["start_s"]} for side, one in servers.items()}
    told["most_requests_per_s"] = records.most()
    loads = dict.fromkeys(record["load"] for record in jobs)
    told["loads"] = [summarise_load(load, jobs) for load in loads]
    return told


def summarise_load(load: str, jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [record for record in jobs if record["load"] == load]
    told: dict[str, Any] = {"load": load, "sides": {}, "missing": {}}
    for side in dict.fromkeys(record["side"] for record in own):
        runs = [r for r in own if (r["side"], r["status"]) == (side, MEASURED)]
        failed = [r["reason"] for r in own if r["side"] == side and r["status"] != MEASURED]
        if failed:
            told["missing"][side] = failed[-1]
        if runs:
            told["sides"][side] = summarise_side(runs)
            told["offered_per_s"] = runs[0]["offered_per_s"]
    for peer in (STOCK, PLAIN):
        theirs = told["sides"].get(peer)
        for side in told["sides"].values() if theirs else ():
            side[f"to_{peer}"] = {
                name: _pick(side, *place) / _pick(theirs, *place) for name, place in RATIOS.items()
            }
    return told


def _pick(side: dict[str, Any], name: str, kind: str) -> float:
    return side[name][kind] if kind else side[name]


def summarise_side(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the turns, and the throughput of each."""
    told: dict[str, Any] = {"runs_tokens_per_s": [run["tokens_per_s"] for run in runs]}
    told |= {name: statistics.median(run[name] for run in runs) for name in MEDIANS}
    for name in SPREADS:
        kinds = runs[0][name]
        told[name] = {kind: statistics.median(run[name][kind] for run in runs) for kind in kinds}
    told["acceptance"] = told["accepted"] / told["drafted"] if told["drafted"] else None
    return told
