"""The demo's table, and one sentence for each of its long contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_COLUMNS = (
    ("decoding", 28),
    ("tokens/s", 10),
    ("tokens/step", 13),
    ("drafts", 8),
    ("accepted", 10),
    ("cache writes avoided", 22),
    ("same tokens", 13),
)


def table(runs: list[dict[str, Any]]) -> list[str]:
    lines = ["".join(title.rjust(width) for title, width in _COLUMNS)]
    for run in runs:
        drafted = bool(run["drafts"])
        cells = (
            run["name"],
            f"{run['tokens_per_second']:.1f}",
            f"{run['tokens_per_step']:.2f}",
            str(run["drafts"]) if drafted else "-",
            str(run["accepted"]) if drafted else "-",
            f"{run['cache_bytes_avoided'] / 1e6:.1f} MB" if drafted else "-",
            {True: "yes", False: "no", None: ""}[run["same_tokens"]],
        )
        pairs = zip(cells, _COLUMNS, strict=True)
        lines.append("".join(cell.rjust(width) for cell, (_, width) in pairs))
    return lines


def sentences(runs: list[dict[str, Any]]) -> Iterator[str]:
    """For each run with drafts over a long context: its speed, what it read, how exact it is."""
    for run in runs:
        over = [one for one in runs if one["prompt_tokens"] == run["prompt_tokens"]]
        full = {one["drafter"]: one for one in over if one["specpv"] == "off"}
        if run["drafter"] == "none" or len(full) == len(over):
            continue  # nothing is compared with it
        if run["specpv"] == "off":
            yield f"{run['name']}: {_ratio(run, full['none'])} plain decoding; {_exactness(run)}."
        else:
            ratio = _ratio(run, full[run["drafter"]])
            yield f"{run['name']}: {ratio} NWOR alone; {_views(run)}; {_exactness(run)}."


def _ratio(run: dict[str, Any], other: dict[str, Any]) -> str:
    return f"{run['tokens_per_second'] / other['tokens_per_second']:.2f} times as fast as"


def _views(run: dict[str, Any]) -> str:
    partial = run["step_kinds"].get("partial", 0)
    if not partial:
        return "no step was partial"
    share = f"{100 * run['view_coverage']:.0f} %"
    return f"{partial} of {run['steps']} steps were partial and read {share} of the context"


def _exactness(run: dict[str, Any]) -> str:
    if run["specpv"] in ("off", "lossless"):
        return "exact" if run["same_tokens"] else "NOT exact, which is an error"
    if run["same_tokens"]:
        agreed = "the tokens happen to be those of plain decoding"
    else:
        agreed = f"the first {run['agreed_tokens']} tokens are those of plain decoding"
    if run["specpv"] == "refresh":
        return f"not exact: {agreed}, and drift is not counted in this mode"
    if run["drift"] is None:
        return f"not exact: {agreed}, and no token was rechecked"
    return (
        f"not exact: {agreed}, and full attention would have chosen {100 * run['drift']:.1f} % of "
        "the rechecked tokens otherwise"
    )
