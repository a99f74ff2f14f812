"""`nwor-specpv demo`: decodes with a real model in several ways and shows one table and a page.

SmolLM2-135M-Instruct answers a question plainly, with n-gram drafts and with the draft trees of an
EAGLE3 head. Then it reads 6144 tokens of War and Peace and continues them, with full and with
partial verification.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nwor_specpv.cli.generate import (
    VIEW_TOKENS,
    add_model_arguments,
    encode,
    load,
    model_name,
    view_config,
)
from nwor_specpv.cli.parser import Parser, count
from nwor_specpv.cli.report import check_place, write_page

from .table import sentences, table
from .texts import CHAT, book_prompt

_WARM_UP = 32  # tokens
_PARTIAL_STEPS = 4  # between confirmations: a lossless tail is discarded from a wrong token on


def build_parser() -> Parser:
    parser = Parser(prog="nwor-specpv demo", description=__doc__)
    parser.add_argument("--prompt", default=CHAT[0], help="the question")
    parser.add_argument("--max-new-tokens", type=count, default=160, help="default: 160")
    parser.add_argument(
        "--context", type=count, default=6144, help="tokens of the long text, default: 6144"
    )
    parser.add_argument(
        "--view-tokens",
        type=count,
        default=VIEW_TOKENS,
        help=f"tokens that a partial step attends to, default: {VIEW_TOKENS}",
    )
    parser.add_argument("--drafter", help="default: eagle3, with --model ngram")
    parser.add_argument(
        "--report", type=Path, help="file of the page, default: in the cache folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_model_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from nwor_specpv.models import cache_root
    from nwor_specpv.transformers.drafting import check_drafter

    started = time.perf_counter()
    say = _quiet if arguments.json else _say
    path = arguments.report or cache_root() / "demo.html"
    check_place(path)
    # The shipped head fits the default model only.
    arguments.drafter = arguments.drafter or ("ngram" if arguments.model else "eagle3")
    check_drafter(arguments.drafter, None)
    view_config("lossless", arguments.view_tokens)
    once = "" if arguments.model else " (converted once, 540 MB in the cache folder)"
    say(f"loading {model_name(arguments)}{once} ..")
    model, tokenizer = load(arguments)
    report = decode(model, tokenizer, arguments, say)
    report["page"] = str(write_page(report, path))
    report["seconds"] = time.perf_counter() - started
    report["table"] = [*table(report["runs"]), *sentences(report["runs"])]
    ok = all(one["same_tokens"] is not False for one in report["runs"] if one["exact"])
    print(json.dumps(report) if arguments.json else describe(report))
    if not ok:
        print("nwor-specpv: an exact way of decoding gave other tokens", file=sys.stderr)
    return 0 if ok else 1


def decode(
    model: Any, tokenizer: Any, arguments: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs every way of decoding and records it."""
    from nwor_specpv.bench.report import machine
    from nwor_specpv.cli.report.sweep import Mode, sweep
    from nwor_specpv.transformers import Generator

    drafter, context, views = arguments.drafter, arguments.context, arguments.view_tokens
    names = {"ngram": "n-gram", "eagle3": "EAGLE3 trees"}
    trees = names.get(drafter, drafter)
    question = encode(tokenizer, arguments.prompt, raw=False)
    # Room for all runs: a cache that has to grow forgets the long text, which then runs again.
    room = context + len(question) + 8 * arguments.max_new_tokens + 1024
    first = Generator(model, tokenizer, "none", cache_tokens=room)
    say("measuring what verification steps cost ..")
    costs = first.row_costs
    drafters = dict.fromkeys((drafter, "ngram"))
    say(f"answering a question in {len(drafters) + 1} ways ..")
    short = sweep(
        first,
        [
            *(Mode(f"NWOR, {names.get(name, name)}", name) for name in drafters),
            Mode("plain decoding"),
        ],
        question,
        arguments.max_new_tokens,
    )
    say(f"reading {context} tokens, then continuing them in five ways ..")
    long = sweep(
        first,
        [
            Mode(f"SpecPV lossless, {context}", drafter, "lossless", views, _PARTIAL_STEPS, False),
            Mode(f"SpecPV rectify, {context}", drafter, "rectify", views),
            Mode(f"SpecPV refresh, {context}", drafter, "refresh", views),
            Mode(f"NWOR, {trees}, {context}", drafter),
            Mode(f"plain decoding, {context}"),
        ],
        book_prompt(tokenizer, context),
        min(128, arguments.max_new_tokens),
        min(_WARM_UP, arguments.max_new_tokens),
    )
    for one in (*short, *long):
        one["exact"] = one["specpv"] in ("off", "lossless")
    return {
        "title": "nwor_specpv: the demo's report",
        "model": model_name(arguments),
        "machine": machine(arguments.device),
        "row_costs": costs,
        "runs": [*reversed(short), *reversed(long)],
    }


def describe(report: dict[str, Any]) -> str:
    """The answer, the table and its sentences."""
    text = "".join(piece for piece, _ in report["runs"][0]["pieces"]).strip()
    lines = ["", *("  " + line for line in text.splitlines()), "", *report["table"]]
    return "\n".join([*lines, "", f"report: {report['page']}  ({report['seconds']:.0f} s)"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass
