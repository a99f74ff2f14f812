"""`nwor-specpv report`: one self-contained HTML page about runs, recorded before or run now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nwor_specpv._parser import Parser, count
from nwor_specpv.errors import NworError

from .page import render

__all__ = ["main", "render", "write_page"]

PROMPT = "Explain how a refrigerator keeps food cold, step by step."
DEFAULT = Path("nwor_specpv_report.html")


def main(argv: list[str]) -> int:
    from nwor_specpv.transformers.command import add_model_arguments

    parser = Parser(prog="nwor-specpv report", description=__doc__)
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="recorded runs")
    parser.add_argument("--out", type=Path, default=DEFAULT, help=f"default: {DEFAULT}")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=count, default=128)
    parser.add_argument(
        "--modes", default="eagle3,ngram,none", help="drafters, with :MODE for partial verification"
    )
    parser.add_argument("--json", action="store_true", help="print the page's path as JSON")
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)
    report = _recorded(arguments.source) if arguments.source is not None else _run(arguments)
    path = write_page(report, arguments.out)
    print(json.dumps({"page": str(path)}) if arguments.json else f"report: {path}")
    return 0


def write_page(report: dict[str, Any], path: Path) -> Path:
    """Writes the page beside its place first: it is there whole or not at all."""
    text = render(report)
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise NworError(f"--out: got {str(path)!r}, which cannot be written: {error}") from None
    finally:
        beside.unlink(missing_ok=True)
    return path.resolve()


def _recorded(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NworError(f"--from: got {str(path)!r}, which cannot be read: {error}") from None
    if not isinstance(report, dict) or not isinstance(report.get("runs"), list):
        raise NworError(f"--from: {path} has no runs, expected what `demo --json` printed")
    return report


def _run(arguments: Any) -> dict[str, Any]:
    from nwor_specpv.bench.report import machine
    from nwor_specpv.transformers import Generator
    from nwor_specpv.transformers.command import encode, load

    from .sweep import Mode, sweep

    modes = []
    for text in arguments.modes.split(","):
        drafter, _, specpv = text.partition(":")
        name = "plain" if drafter == "none" else drafter
        modes.append(Mode(f"{name} {specpv}".strip(), drafter, specpv or "off"))
    model, tokenizer = load(arguments)
    first = Generator(model, tokenizer, "none")
    prompt = encode(tokenizer, arguments.prompt, raw=False)
    return {
        "title": "Speculative decoding without writes on reject",
        "model": type(model).__name__ if arguments.model else "SmolLM2-135M-Instruct",
        "machine": machine(arguments.device),
        "row_costs": first.row_costs,
        "runs": sweep(first, modes, prompt, arguments.max_new_tokens),
    }
