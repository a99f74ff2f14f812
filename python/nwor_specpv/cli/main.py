"""The command line: `nwor-specpv`, also `python -m nwor_specpv`.

Exit status: 0 success, 1 failure, 2 wrong use with one line on stderr. With --json a command prints
one JSON document on stdout and nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nwor_specpv import _stamp
from nwor_specpv.errors import NworError

from .parser import EXIT_USAGE, PROGRAM, Parser, address

BENCHES = {
    "commit": "stage and commit, compared with plain cache writes",
    "attention": "verify attention, compared with other attention kernels",
    "retrieval": "choice of blocks, and whole partial steps",
    "coverage": "share of a real model's attention that partial views see",
    "tree": "trees and acceptance, compared with plain Python and torch",
    "session": "rollback of short and long sequences",
    "generate": "whole generations, compared with transformers' own",
}
# Commands with a module of the same name here: build_parser() and run(arguments).
HOSTED = {
    "generate": "continue a prompt, with any drafter and mode",
    "report": "write a page about one run or several",
    "demo": "decode with a real model in several ways and show one table",
    "worker": "serve a model's sessions over gRPC to drafters in other processes",
    "draft": "continue a prompt with drafts from here and the model of a worker",
}

EXIT_OK, EXIT_FAILURE = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdout is None:
        print(f"{PROGRAM}: standard output is closed; send it to /dev/null", file=sys.stderr)
        return EXIT_FAILURE
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader left, as `| head` does
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        wrong_use = isinstance(error, NworError)
        explained = wrong_use or isinstance(error, _stamp.StampMismatch)
        name = "" if explained else f"{type(error).__name__}: "
        print(f"{PROGRAM}: {name}{' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE if wrong_use else EXIT_FAILURE
    finally:
        _drop_unwritten()


def _run(argv: list[str]) -> int:
    parser = _build_parser()
    try:
        arguments, rest = parser.parse_known_args(argv)
        if arguments.version:
            return _version()
        if "run" not in arguments:
            names = ", ".join(("status", "doctor", "bench", *HOSTED))
            parser.error(f"a command is needed: {names}")
        if rest and not arguments.passes_rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return arguments.run(arguments, rest)
    except SystemExit as ended:  # a parser's, after help or wrong use
        return ended.code


def _drop_unwritten() -> None:
    """Drops output that cannot be written, so that the interpreter does not fail on it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Speculative decoding without writes on reject.")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(metavar="command", parser_class=Parser)

    def add(name: str, run: Callable[[Any, list[str]], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, passes_rest=False)
        return command

    status = add("status", _status, "show this machine, or what a running server does")
    status.add_argument("--json", action="store_true", help="print one JSON document")
    status.add_argument(
        "--url", type=address, help="show the server with this metrics endpoint, not this machine"
    )
    status.add_argument("--local", action="store_true", help="with --url: show this machine, too")
    doctor = add("doctor", _doctor, "check what is missing and how to get it")
    doctor.add_argument("--json", action="store_true", help="print one JSON document")

    bench = add("bench", _bench, "measure, beside other libraries")
    names = bench.add_subparsers(metavar="{" + ",".join(BENCHES) + "}", dest="bench")
    names.required = True
    for name, text in BENCHES.items():
        one = names.add_parser(name, help=text, add_help=False)
        one.set_defaults(passes_rest=True)
    for name, text in HOSTED.items():
        hosted = commands.add_parser(name, help=text, add_help=False)
        hosted.set_defaults(run=_hosted, passes_rest=True, hosted=name)
    return parser


def _version() -> int:
    print(f"{PROGRAM} {_stamp.read_stamp().version}")
    return EXIT_OK


def _status(arguments: argparse.Namespace, rest: list[str]) -> int:
    from . import server_status, status

    report: dict[str, Any] = {"ok": True, "problem": None}
    lines: list[tuple[str, str]] = []
    if arguments.url is None or arguments.local:
        report = status.collect()
        lines = status.lines(report)
    # Without --url, the settings in the environment may name a server.
    url = arguments.url or report["metrics"]["url"]
    report["server"] = server = server_status.collect(url) if url else None
    if server:
        lines += server_status.lines(server)
    if arguments.url and server["problem"]:
        report |= {"ok": False, "problem": report["problem"] or server["problem"]}
    print(json.dumps(report, indent=2) if arguments.json else status.aligned(lines))
    return EXIT_OK if report["ok"] else EXIT_FAILURE


def _doctor(arguments: argparse.Namespace, rest: list[str]) -> int:
    from . import doctor

    findings = doctor.examine()
    report = doctor.as_json(findings)
    print(json.dumps(report, indent=2) if arguments.json else doctor.describe(findings))
    return EXIT_OK if report["ok"] else EXIT_FAILURE


def _bench(arguments: argparse.Namespace, rest: list[str]) -> int:
    _stamp.load_native()
    module = importlib.import_module(f"nwor_specpv.bench.{arguments.bench}")
    return int(module.main(rest) or EXIT_OK)


def _hosted(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Reads the line before it loads the library: help and wrong use take no time."""
    module = importlib.import_module(f"nwor_specpv.cli.{arguments.hosted}")
    parsed = module.build_parser().parse_args(rest)
    _stamp.load_native()
    return int(module.run(parsed) or EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
