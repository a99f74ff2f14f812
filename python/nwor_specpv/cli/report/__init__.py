"""`nwor-specpv report`: writes one self-contained HTML page about runs, recorded or run now."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from nwor_specpv._files import write_whole
from nwor_specpv.cli.generate import add_model_arguments, encode, load, model_name, view_config
from nwor_specpv.cli.parser import Parser, can_write, count
from nwor_specpv.errors import NworError

from .page import render

__all__ = ["build_parser", "check_place", "render", "run", "write_page"]

PROMPT = "Explain how a refrigerator keeps food cold, step by step."
DEFAULT = Path("nwor_specpv_report.html")


def build_parser() -> Parser:
    parser = Parser(prog="nwor-specpv report", description=__doc__)
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="use runs that `demo --json` recorded",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--prompt", default=PROMPT, help="the text to answer")
    parser.add_argument("--max-new-tokens", type=count, default=128, help="default: 128")
    parser.add_argument(
        "--modes",
        default="eagle3,ngram,none",
        help="drafters, with :MODE for partial verification; tokens are compared with those of the "
        "last one; default: eagle3,ngram,none",
    )
    parser.add_argument("--json", action="store_true", help="print the page's path as JSON")
    add_model_arguments(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_place(arguments.out)
    if arguments.source is None:
        path = write_page(_decode(arguments), arguments.out)
    else:
        path = _write_recorded(arguments.source, arguments.out)
    print(json.dumps({"page": str(path)}) if arguments.json else f"report: {path}")
    return 0


def check_place(path: Path) -> None:
    """Raises if a page cannot be written there. Called before the work, not after it."""
    if not can_write(path):
        raise NworError(f"page: got {str(path)!r}, expected a file in a writable folder")


def write_page(report: dict[str, Any], path: Path) -> Path:
    """Writes the whole page, or nothing."""
    text = render(report)
    try:
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        why = error.strerror or error
        raise NworError(f"page: got {str(path)!r}, which cannot be written: {why}") from None
    return path.resolve()


def _write_recorded(source: Path, path: Path) -> Path:
    report = _recorded(source)
    try:
        return write_page(report, path)
    except NworError:  # a ValueError, about the place
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NworError(
            f"--from: {source} is no record of runs ({type(error).__name__}: {error}), expected "
            "what `demo --json` printed"
        ) from None


def _recorded(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise NworError(f"--from: got {str(path)!r}, which cannot be read: {error}") from None
    if not isinstance(report, dict) or not isinstance(report.get("runs"), list):
        raise NworError(f"--from: {path} has no runs, expected what `demo --json` printed")
    return report


def _decode(arguments: argparse.Namespace) -> dict[str, Any]:
    from nwor_specpv.bench.report import machine
    from nwor_specpv.transformers import Generator
    from nwor_specpv.transformers.drafting import check_drafter

    from .sweep import Mode, sweep

    modes = []
    for text in arguments.modes.split(","):
        drafter, _, specpv = text.partition(":")
        name = "plain" if drafter == "none" else drafter
        check_drafter(drafter, None)
        view_config(specpv or "off", Mode.view_tokens)
        modes.append(Mode(f"{name} {specpv}".strip(), drafter, specpv or "off"))
    model, tokenizer = load(arguments)
    first = Generator(model, tokenizer, "none")
    prompt = encode(tokenizer, arguments.prompt, raw=False)
    return {
        "title": "Speculative decoding without writes on reject",
        "model": model_name(arguments),
        "machine": machine(arguments.device),
        "row_costs": first.row_costs,
        "runs": sweep(first, modes, prompt, arguments.max_new_tokens),
    }
