"""`nwor-specpv demo`: a real model, four ways of decoding, one table and a page about it.

SmolLM2-135M-Instruct answers a question plainly, with n-gram drafts and with the trees of an EAGLE3
head; then it reads a log of 4096 tokens and goes on with partial verification, without loss.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nwor_specpv.cli.parser import Parser, count
from nwor_specpv.cli.report import check_place, write_page
from nwor_specpv.models import cache_root

from .texts import CHAT, long_prompt

_VIEW_TOKENS = 1024


def main(argv: list[str]) -> int:
    from nwor_specpv.cli.generate import add_model_arguments, load, model_name

    parser = Parser(prog="nwor-specpv demo", description=__doc__)
    parser.add_argument("--prompt", default=CHAT[0], help="the question")
    parser.add_argument("--max-new-tokens", type=count, default=160, help="default: 160")
    parser.add_argument(
        "--context", type=count, default=4096, help="tokens of the long prompt, default: 4096"
    )
    parser.add_argument("--report", type=Path, help="where the page goes, default: the cache")
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    say = _quiet if arguments.json else _say
    path = arguments.report or cache_root() / "demo.html"
    check_place(path)
    once = "" if arguments.model else " (converted once, 540 MB in the cache folder)"
    say(f"loading {model_name(arguments)}{once} ..")
    model, tokenizer = load(arguments)
    report = run(model, tokenizer, arguments, say)
    report["page"] = str(write_page(report, path))
    report["seconds"] = time.perf_counter() - started
    report["table"] = table(report)
    ok = all(one["same_tokens"] is not False for one in report["runs"])
    if arguments.json:
        print(json.dumps(report))
    else:
        print(describe(report))
    if not ok:
        print("nwor-specpv: a way of decoding gave other tokens", file=sys.stderr)
    return 0 if ok else 1


def run(model: Any, tokenizer: Any, arguments: Any, say: Any) -> dict[str, Any]:
    """Every way of decoding, and what each did."""
    from nwor_specpv.bench.report import machine
    from nwor_specpv.cli.generate import encode, model_name
    from nwor_specpv.cli.report.sweep import Mode, sweep
    from nwor_specpv.transformers import Generator

    first = Generator(model, tokenizer, "none")
    say("measuring what verification steps cost ..")
    costs = first.row_costs
    say("answering a question, three ways ..")
    short = sweep(
        first,
        [
            Mode("NWOR, EAGLE3 trees", "eagle3"),
            Mode("NWOR, n-gram", "ngram"),
            Mode("plain decoding"),
        ],
        encode(tokenizer, arguments.prompt, raw=False),
        arguments.max_new_tokens,
    )
    say(f"reading {arguments.context} tokens, then going on three ways ..")
    long = sweep(
        first,
        [
            Mode(f"SpecPV lossless, {arguments.context}", "eagle3", "lossless", _VIEW_TOKENS),
            Mode(f"NWOR, EAGLE3 trees, {arguments.context}", "eagle3"),
            Mode(f"plain decoding, {arguments.context}"),
        ],
        long_prompt(tokenizer, arguments.context),
        min(64, arguments.max_new_tokens),
    )
    return {
        "title": "nwor_specpv: the demo's report",
        "model": model_name(arguments),
        "machine": machine(arguments.device),
        "row_costs": costs,
        "runs": [*reversed(short), *reversed(long)],
    }


def describe(report: dict[str, Any]) -> str:
    """The answer and the table."""
    text = "".join(piece for piece, _ in report["runs"][0]["pieces"]).strip()
    lines = ["", *("  " + line for line in text.splitlines()), "", *table(report)]
    return "\n".join([*lines, "", f"report: {report['page']}  ({report['seconds']:.0f} s)"])


def table(report: dict[str, Any]) -> list[str]:
    columns = (
        ("decoding", 28),
        ("tokens/s", 10),
        ("tokens/step", 13),
        ("drafts", 8),
        ("accepted", 10),
        ("cache writes avoided", 22),
        ("same tokens", 13),
    )
    lines = ["".join(title.rjust(width) for title, width in columns)]
    for one in report["runs"]:
        drafted = bool(one["drafts"])
        cells = (
            one["name"],
            f"{one['tokens_per_second']:.1f}",
            f"{one['tokens_per_step']:.2f}",
            str(one["drafts"]) if drafted else "-",
            str(one["accepted"]) if drafted else "-",
            f"{one['cache_bytes_avoided'] / 1e6:.1f} MB" if drafted else "-",
            {True: "yes", False: "NO", None: ""}[one["same_tokens"]],
        )
        lines.append(
            "".join(cell.rjust(width) for cell, (_, width) in zip(cells, columns, strict=True))
        )
    for one in report["runs"]:
        if one["specpv"] == "lossless" and not one["step_kinds"]:
            lines.append(
                f"{one['name']}: views do not pay here, by what steps were measured to cost; it "
                "took full steps"
            )
    return lines


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass
