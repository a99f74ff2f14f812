#!/usr/bin/env python3
"""Runs the benchmarks of benchmarks/results/h200 again, with the commands of recorded.toml.

    tools/gpu_benchmarks.py [NAMES ...] [--list] [--minutes 9] [--folder NAME=DIR ...]
                            [--work DIR] [--into DIR] [--retry]

NAMES are those of the files; without any, all that have commands are run, one after another. A file
is written to --into only when all its commands have succeeded. With --minutes a call ends in time,
and the next one goes on: what is done for the same sources is not run again, and programs that keep
their own records go on with these. What has failed is run again with --retry; its output is in
WORK/NAME.log. The exit status is 0 when all is done, 75 while something is left, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run_tests import digest_of
from tables.recorded import Result, read_results
from tables.records import RESULTS, ROOT

FOLDER = "h200"
UNFINISHED = 75
MEASURED = ("csrc", "python", "benchmarks")
_LEAST_SECONDS = 30.0  # with less left nothing is started
_GRACE_SECONDS = 5.0  # programs that watch the time end before they are ended
_LOG_END = 1500  # characters


class State:
    """What is done and what has failed, of one state of the sources: seconds, or why; the number of
    commands that are done; seconds in which one did not end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state.json"
        sources = digest_of(ROOT, MEASURED)
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        if known.get("sources", sources) != sources:
            print(f"the sources have changed: all of {folder} is measured again")
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            known = {}
        self._data: dict[str, Any] = {"sources": sources}
        self._data |= {name: {} for name in ("done", "failed", "steps", "cut")} | known

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._data[name]

    def save(self) -> None:
        self._path.write_text(json.dumps(self._data, indent=1) + "\n")


def benchmarks() -> list[Result]:
    """Those that have commands."""
    results = read_results()
    return [r for r in results if r.commands and r.file.startswith(f"{FOLDER}/")]


def needs_folder(result: Result) -> bool:
    return any("FOLDER" in command.split() for command in result.commands)


def argv(command: str, values: dict[str, str]) -> list[str]:
    """A command of the table, with this interpreter."""
    words = [values.get(word, word) for word in shlex.split(command)]
    if words[0] == "nwor-specpv":
        return [sys.executable, "-m", "nwor_specpv", *words[1:]]
    return [sys.executable if words[0] == "python" else str(ROOT / words[0]), *words[1:]]


def environment() -> dict[str, str]:
    """Scripts call python3: the one that runs this."""
    own = str(Path(sys.executable).parent)
    search = os.pathsep.join([own, os.environ.get("PATH", "")])
    return os.environ | {"PATH": search, "PYTHON": sys.executable}


def call(command: list[str], log: Path, deadline: float) -> int | None:
    """The status of a command, None if it was ended at the deadline."""
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=file, start_new_session=True
        )
        try:
            return child.wait(timeout=max(0.0, deadline - time.monotonic()) if deadline else None)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def measure(result: Result, folder: str, state: State, work: Path, deadline: float) -> str:
    """Runs what is left of its commands: "done", "left", or why it has failed."""
    out, kept, log = (work / f"{result.name}{end}" for end in (result.path.suffix, "", ".log"))
    kept.mkdir(exist_ok=True)
    while (step := state["steps"].get(result.name, 0)) < len(result.commands):
        left = deadline - time.monotonic() if deadline else 0.0
        least = max(_LEAST_SECONDS, state["cut"].get(result.name, 0.0))
        if deadline and left < least:
            return "left"
        values = {"FILE": str(out), "FOLDER": folder, "WORK": str(kept)}
        values["SECONDS"] = str(max(1.0, left - _GRACE_SECONDS)) if deadline else "0"
        code = call(argv(result.commands[step], values), log, deadline)
        if code is None and not any("WORK" in one.split() for one in result.commands):
            state["cut"][result.name] = left + 1.0  # it would begin anew, so it needs more
            state.save()
        if code in (None, UNFINISHED):
            return "left"
        if code:
            return f"status {code}\n{log.read_text(errors='replace')[-_LOG_END:]}"
        state["steps"][result.name] = step + 1
        state.save()
    if not out.exists():
        return f"{out} was not written"
    if out.suffix == ".json":
        try:
            json.loads(out.read_text(encoding="utf-8"))
        except ValueError as error:
            return f"{out} is no JSON: {error}"
    return "done"


def parse(arguments: list[str] | None, known: dict[str, Result]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of files, without their endings")
    parser.add_argument("--list", action="store_true", help="names and commands; runs nothing")
    parser.add_argument("--minutes", type=float, default=0, help="of this call; 0: no limit")
    parser.add_argument("--folder", nargs="+", default=[], metavar="NAME=DIR",
                        help="of the model, where a command has FOLDER")  # fmt: skip
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu_benchmarks")
    parser.add_argument("--into", type=Path, default=RESULTS / FOLDER)
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    options = parser.parse_args(arguments)
    options.folder = dict(word.partition("=")[::2] for word in options.folder)
    for name in (*options.names, *options.folder):
        if name not in known:
            parser.error(f"{name}: expected one of {', '.join(known)}")
    for name in options.names:
        if needs_folder(known[name]) and name not in options.folder:
            parser.error(f"{name} needs a model: --folder {name}=DIR")
    return options


def main(arguments: list[str] | None = None) -> int:
    began = time.monotonic()
    known = {result.name: result for result in benchmarks()}
    options = parse(arguments, known)
    if options.list:
        for name, result in known.items():
            print(f"{name}:", *result.commands, sep="\n  ")
        return 0
    for folder in (options.work, options.into):
        folder.mkdir(parents=True, exist_ok=True)
    options.work = options.work.resolve()
    state = State(options.work)
    if options.retry:
        for name in list(state["failed"]):
            del state["failed"][name]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    deadline = began + 60 * options.minutes if options.minutes else 0.0
    chosen = [known[name] for name in options.names] or list(known.values())
    without = [r.name for r in chosen if needs_folder(r) and r.name not in options.folder]
    left: list[str] = []
    for result in chosen:
        if result.name in (*without, *state["done"], *state["failed"]):
            continue
        started = time.monotonic()
        folder = options.folder.get(result.name, "")
        what = measure(result, folder, state, options.work, deadline)
        if what == "left":
            left.append(result.name)
            continue
        seconds = round(time.monotonic() - started, 1)
        if what == "done":
            shutil.copy(options.work / result.path.name, options.into)
            state["done"][result.name] = seconds
        else:
            state["failed"][result.name] = what
        state.save()
        print(f"{result.name}: {what.splitlines()[0]} ({seconds} s)", flush=True)
    names = [result.name for result in chosen]
    failed = [name for name in names if name in state["failed"]]
    for told, some in (("left", left), ("failed", failed), ("without --folder", without)):
        if some:
            print(f"{told}: {', '.join(some)}")
    for name in left:
        if seconds := state["cut"].get(name):
            print(f"{name} did not end in time: it wants a call with more than {seconds:.0f} s")
    old = [known[name] for name in names if name in state["done"] and known[name].made_by]
    for result in old:
        print(f"{result.name}: take made_by out of recorded.toml, the file is of its commands now")
    return UNFINISHED if left else int(bool(failed or without))


if __name__ == "__main__":
    sys.exit(main())
