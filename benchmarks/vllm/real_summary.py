"""From the records of real.py to one result: a JSON file, a table in Markdown and a plot."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import real_prompts
from real_records import FAILED, MEASURED, REFERENCE, SKIPPED, Cell, Job, Records

TOOLS = Path(__file__).resolve().parents[2] / "tools"
MEDIANS = (
    "tokens_per_s", "tokens_per_step", "passes_per_step", "drafted", "accepted", "steps",
    "views_drafted", "views_confirmed", "after_end", "repeated",
)  # fmt: skip
SPREADS = ("step_ms", "first_token_s", "output_gap_ms", "token_ms")
ENGINE = (
    "runner", "scheduler", "async_scheduling", "drafter", "drafts", "cudagraph_mode", "options",
)  # fmt: skip


def identify(args: Namespace) -> None:
    """Notes in DIR what is measured; one folder holds one model, text, size and revision."""
    path = args.out / "run.json"
    text = real_prompts.read_text(args.text)
    told: dict[str, Any] = {
        "model": args.model_name,
        "head": Path(args.head).name if args.head else None,
        "text": text.name,
        "text_sha256": text.sha256,
        "dtype": args.dtype,
        "tokens": args.tokens,
        "warm_tokens": args.warm_tokens,
        "settings": args.set,
    }
    known = json.loads(path.read_text()) if path.exists() else {}
    told["revision"] = args.revision or known.get("revision", "")
    other = [name for name, value in told.items() if known.get(name, value) != value]
    if other:
        name = other[0]
        raise SystemExit(
            f"{args.out} holds a run with {name} {known[name]!r}, not {told[name]!r}: "
            "choose another --out"
        )
    told["quantisation"] = args.quantisation or known.get("quantisation", "")
    told["weights_sha256"] = known.get("weights_sha256") or weights_sha256(Path(args.model))
    path.write_text(json.dumps(told, indent=1) + "\n")


def weights_sha256(folder: Path) -> str:
    """Of all files of weights, one after the other by name."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    return digest.hexdigest()


def write(out: Path, result: Path, revision: str) -> int:
    """Writes the result, and the table and the plot beside the records."""
    run = json.loads((out / "run.json").read_text())
    records = Records(out / "records.jsonl")
    told = summarise(run | ({"revision": revision} if revision else {}), records)
    result.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    sys.path.insert(0, str(TOOLS))
    from tables import real, real_plot

    table = "\n".join(real.result_lines(told)) + "\n"
    (out / "table.md").write_text(table, encoding="utf-8")
    (out / "plot.svg").write_text(real_plot.render(told), encoding="utf-8")
    print(table, end="")
    return 0


def summarise(run: dict[str, Any], records: Records) -> dict[str, Any]:
    jobs, engines = records.jobs(), records.engines()
    first = engines[0] if engines else {}
    names = ("device", "python", "torch", "cuda", "vllm", "dtype", "text_tokens")
    told = run | {name: first.get(name) for name in names}
    told["revision"] = run["revision"] or first.get("commit")
    told["quantisation"] = run["quantisation"] or first.get("quantisation") or "none"
    told["engines"] = {
        one["engine"]: {name: one[name] for name in ENGINE}
        | {"start_s": [e["start_s"] for e in engines if e["engine"] == one["engine"]]}
        for one in engines
    }
    cells = dict.fromkeys(Job.of(record).cell for record in jobs)
    told["cells"] = [summarise_cell(cell, jobs) for cell in cells]
    return told


def summarise_cell(cell: Cell, jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [record for record in jobs if Job.of(record).cell == cell]
    reference = next((r for r in own if r["turn"] == REFERENCE and "second_best" in r), None)
    timed = [record for record in own if record["turn"] != REFERENCE]
    told: dict[str, Any] = {"requests": cell.requests, "context": cell.context}
    told |= {"prompt": cell.prompt, "temperature": cell.temperature, "sides": {}, "missing": {}}
    for side in dict.fromkeys(record["side"] for record in timed):
        runs = [r for r in timed if (r["side"], r["status"]) == (side, MEASURED)]
        if runs:
            told["sides"][side] = summarise_side(runs, reference)
        for record in timed:
            if record["side"] == side and record["status"] in (FAILED, SKIPPED):
                told["missing"][side] = record["reason"]
    plain = told["sides"].get("plain", {}).get("runs_tokens_per_s", [])
    for side in told["sides"].values():
        if plain and all(plain):  # within a turn, as hosts are not always alike
            pairs = zip(side["runs_tokens_per_s"], plain, strict=False)
            side["speed"] = statistics.median(own / other for own, other in pairs)
    return told


def summarise_side(
    runs: Sequence[dict[str, Any]], reference: dict[str, Any] | None
) -> dict[str, Any]:
    """Medians over the turns, and the speed of each."""
    told: dict[str, Any] = {"runs_tokens_per_s": [run["tokens_per_s"] for run in runs]}
    for name in MEDIANS:
        values = [run[name] for run in runs if name in run]
        if values:
            told[name] = statistics.median(values)
    for name in SPREADS:
        found = [run[name] for run in runs if run[name]]
        kinds = found[0] if found else {}
        told[name] = {kind: statistics.median(one[kind] for one in found) for kind in kinds}
    if any("arms" in run for run in runs):
        told["arms"] = dict(sum((Counter(run.get("arms", {})) for run in runs), Counter()))
        told["arm_means"] = arm_means([step for run in runs for step in run.get("arm_steps", ())])
    failures = [run["draft_failures"] for run in runs if run.get("draft_failures")]
    if failures:
        told["draft_failures"] = failures[-1]
    stops = [run["stopped"] for run in runs if run["stopped"]]
    if stops:
        told["stopped"] = stops[-1]
    if reference is not None and "outputs" in runs[0]:
        told["greedy"] = [differences(reference, run["outputs"]) for run in runs]
    return told


def arm_means(steps: Sequence[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """What steps of each arm took and brought, of those that the plugin could measure."""
    told = {}
    for arm in dict.fromkeys(arm for arm, _, _ in steps):
        own = [(ms, tokens) for name, ms, tokens in steps if name == arm]
        ms, tokens = (statistics.fmean(values) for values in zip(*own, strict=True))
        told[arm] = {"measured": len(own), "ms": ms, "tokens": tokens}
    return told


def differences(reference: dict[str, Any], outputs: Sequence[list[int]]) -> dict[str, Any]:
    """Requests with the reference's tokens, and the first other token of each other request.

    `gap` is by how much the reference prefers its own token, as a difference of log-probabilities,
    to the one that came, or to its second-best where that one came third or later (`third`).
    """
    found = []
    for request, (expected, tokens) in enumerate(zip(reference["outputs"], outputs, strict=True)):
        pairs = enumerate(zip(expected, tokens, strict=False))
        place = next((index for index, (one, other) in pairs if one != other), None)
        if place is not None:
            second, gap = reference["second_best"][request][place]
            third = tokens[place] != second
            found.append({"request": request, "position": place, "gap": gap, "third": third})
    return {"requests": len(outputs), "equal": len(outputs) - len(found), "differences": found}
