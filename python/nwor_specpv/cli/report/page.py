"""The page: one file, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from . import charts

# From the target's own token to the deepest draft: paper, then ever stronger greens.
_DEPTHS = ("transparent", "#d6f0d8", "#abe0b2", "#7fcf8c", "#55b968", "#2f9e4a", "#1c7a37")

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1f2328; --paper: #ffffff; --soft: #6b7280; --line: #d8dee4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #15191f; --soft: #9aa4b0; --line: #333b45 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p.note { color: var(--soft); margin: .2rem 0 .8rem }
table { border-collapse: collapse; width: 100% } th, td { padding: .3rem .6rem; text-align: right;
  border-bottom: 1px solid var(--line) } th:first-child, td:first-child { text-align: left }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink) } svg text.small { font-size: 11px;
  fill: var(--soft) } svg .grid { stroke: var(--line) }
.many { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0 } figcaption { color:
  var(--soft); font-size: 13px }
.text { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 6px; padding: .8rem }
.text span[data-depth]:not([data-depth="0"]) { color: #10240f; border-radius: 2px }
"""


def render(report: dict[str, Any]) -> str:
    """The whole page from what `sweep` recorded."""
    body = "".join(_body(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(report['title'])}</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _body(report: dict[str, Any]) -> Iterator[str]:
    runs = [run | {"color": charts.color(i)} for i, run in enumerate(report["runs"])]
    yield f"<h1>{escape(report['title'])}</h1>"
    machine = report.get("machine", {})
    facts = [report.get("model", ""), *(str(value) for value in machine.values())]
    yield f'<p class="note">{escape(" · ".join(fact for fact in facts if fact))}</p>'
    yield _section("summary", "What was run", _table(runs), "")
    yield _section(
        "speed",
        "Tokens per second",
        charts.bars([(r["name"], r["tokens_per_second"], _speed(r), r["color"]) for r in runs]),
        "Decoding alone, without the prompt's pass.",
    )
    drafting = [r for r in runs if r.get("drafts")]
    yield _section(
        "accepted",
        "Accepted drafts per step",
        _histograms(drafting),
        "Share of verification steps by the number of accepted drafts.",
    )
    yield _section(
        "bytes",
        "Cache bytes of drafts: written and avoided",
        charts.stacked([_bytes_row(r) for r in drafting]),
        "Red: accepted drafts, which were committed. Green: rejected drafts. An engine without "
        "staging writes them and has to clean up; here they never reach the cache.",
    )
    viewing = [r for r in runs if r.get("coverage")]
    yield _section(
        "coverage",
        "View coverage over the context",
        charts.lines(
            [(r["name"], _share(r["coverage"]), r["color"]) for r in viewing],
            "context, tokens",
            "%",
        )
        if viewing
        else _nothing("No run verified partially."),
        "How much of the context partial steps attended to.",
    )
    recorded = [r for r in viewing if r.get("views")]
    if recorded:
        yield _section(
            "views",
            "Which blocks were read",
            "".join(_views(r) for r in recorded),
            "The context from left to right, in one layer. Each row is one choice of blocks, with "
            "the tokens that a KV head reads; grey tokens are not read. The stronger the green, "
            "the more KV heads read the block.",
        )
    yield _section(
        "drift",
        "Drift",
        _drift(runs),
        "The share of rechecked tokens that full attention would have chosen otherwise. Mode "
        "rectify rechecks in its full steps. Mode lossless emits no such token; mode refresh "
        "rechecks nothing.",
    )
    if report.get("row_costs"):
        curve = [(float(rows), 1000 * cost) for rows, cost in report["row_costs"].items()]
        yield _section(
            "rows",
            "What a verification step costs",
            charts.lines(
                [("one step", curve, charts.color(0))], "rows of the step", "ms", x_from_zero=True
            ),
            "Measured at the start. The number of rows is chosen by it and by what is accepted.",
        )
    for run in runs:
        if run.get("pieces") and run.get("drafts"):
            yield _section(
                f"text-{runs.index(run)}",
                f"Text: {run['name']}",
                _example(run),
                "Unmarked tokens come from the target itself. The stronger the green, the deeper "
                "the accepted draft.",
            )


def _section(name: str, title: str, content: str, note: str) -> str:
    text = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{text}{content}</section>'


def _nothing(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _speed(run: dict[str, Any]) -> str:
    return f"{run['tokens_per_second']:.1f}"


def _table(runs: list[dict[str, Any]]) -> str:
    heads = (
        "",
        "context",
        "new tokens",
        "tokens/s",
        "tokens/step",
        "cache writes avoided",
        "same tokens",
    )
    rows = []
    for run in runs:
        same = {True: "yes", False: "no", None: "-"}[run.get("same_tokens")]
        cells = (
            run["name"],
            f"{run['prompt_tokens']:,}",
            str(run["new_tokens"]),
            _speed(run),
            f"{run['tokens_per_step']:.2f}",
            megabytes(run["cache_bytes_avoided"]) if run.get("drafts") else "-",
            same,
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _histograms(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return _nothing("No run had drafts.")
    figures = []
    for run in runs:
        counts = {int(length): count for length, count in run["accepted_lengths"].items()}
        figures.append(
            f"<figure>{charts.histogram(counts, run['color'])}<figcaption>{escape(run['name'])}"
            "</figcaption></figure>"
        )
    return f'<div class="many">{"".join(figures)}</div>'


def _bytes_row(run: dict[str, Any]) -> tuple[str, float, float, str]:
    avoided = run["cache_bytes_avoided"]
    written = run.get("draft_bytes_written")
    if written is None:  # an older record: accepted drafts are as large as rejected ones
        written = avoided * run["accepted"] // max(1, run["rejected_tokens"])
    return run["name"], written, avoided, f"{megabytes(written)} / {megabytes(avoided)}"


def _share(coverage: list[tuple[int, int]]) -> list[tuple[float, float]]:
    ordered = sorted((context, seen) for context, seen in coverage)
    return [(float(context), 100 * seen / context) for context, seen in ordered]


def _views(run: dict[str, Any]) -> str:
    caption = f"<figcaption>{escape(run['name'])}</figcaption>"
    return f"<figure>{charts.views(run['views'])}{caption}</figure>"


def _drift(runs: list[dict[str, Any]]) -> str:
    rows = [r for r in runs if r.get("specpv", "off") != "off"]
    if not rows:
        return _nothing("No run verified partially.")
    bars = []
    for run in rows:
        drift = run.get("drift")
        if run["specpv"] == "lossless":
            text, drift = "none: tokens are confirmed first", 0.0
        elif drift is None:
            text, drift = "not counted", 0.0
        else:
            text = f"{100 * drift:.1f} %"
        bars.append((run["name"], drift, text, run["color"]))
    return charts.bars(bars)


def _example(run: dict[str, Any]) -> str:
    spans = []
    for text, depth in run["pieces"]:
        color = _DEPTHS[min(depth, len(_DEPTHS) - 1)]
        style = "" if depth == 0 else f' style="background:{color}"'
        spans.append(f'<span data-depth="{depth}"{style}>{escape(text)}</span>')
    return f'<div class="text">{"".join(spans)}</div>'


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
