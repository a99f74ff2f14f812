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

from .parser import EXIT_USAGE, PROGRAM, Parser, address

BENCHES = {
    "commit": "stage and commit, beside the writes they replace",
    "attention": "verify attention, beside what users have today",
    "retrieval": "choosing blocks and whole partial steps",
    "coverage": "what partial views see of a real model's attention",
    "tree": "trees and acceptance, beside plain Python and torch",
    "session": "rollback of short and long sequences",
    "generate": "whole generations, beside transformers' own",
}
# Commands that read the rest of the line themselves, and the modules they are in.
HOSTED = {
    "generate": ("cli.generate", "go on with a prompt, with any drafter and mode"),
    "report": ("cli.report", "write a page about one run or a sweep"),
    "demo": ("cli.demo", "a real model, four ways of decoding, one table"),
    "worker": ("cli.worker", "serve a model's sessions to drafters elsewhere, over gRPC"),
}

EXIT_OK, EXIT_FAILURE = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdout is None:
        told = "standard output is closed; /dev/null takes what is not wanted"
        print(f"{PROGRAM}: {told}", file=sys.stderr)
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
        # NworError is a ValueError: a wrong value. Anything else failed.
        wrong_use = any(kind.__name__ == "NworError" for kind in type(error).__mro__)
        name = "" if wrong_use else f"{type(error).__name__}: "
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
    """What could not be written: the interpreter must not trip over it again at exit."""
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
    doctor = add("doctor", _doctor, "say what is missing and how to get it")
    doctor.add_argument("--json", action="store_true", help="print one JSON document")

    bench = add("bench", _bench, "measure against peers")
    names = bench.add_subparsers(metavar="{" + ",".join(BENCHES) + "}", dest="bench")
    names.required = True
    for name, text in BENCHES.items():
        one = names.add_parser(name, help=text, add_help=False)
        one.set_defaults(passes_rest=True)
    for name, (_, text) in HOSTED.items():
        hosted = commands.add_parser(name, help=text, add_help=False)
        hosted.set_defaults(run=_hosted, passes_rest=True, hosted=name)
    return parser


def _version() -> int:
    from nwor_specpv import _stamp

    try:
        print(f"{PROGRAM} {_stamp.read_stamp().version}")
    except _stamp.StampMismatch as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_FAILURE
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
    return _dispatch(f"bench.{arguments.bench}", rest)


def _hosted(arguments: argparse.Namespace, rest: list[str]) -> int:
    return _dispatch(HOSTED[arguments.hosted][0], rest)


def _dispatch(name: str, argv: list[str]) -> int:
    """Runs main(argv) of a module of this package; what it returns is the exit status."""
    from . import status

    native, problem = status.load_native()
    if native is None:
        print(f"{PROGRAM}: {problem}", file=sys.stderr)
        return EXIT_FAILURE
    module = importlib.import_module(f"nwor_specpv.{name}")
    return int(module.main(argv) or EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
