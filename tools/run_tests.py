#!/usr/bin/env python3
"""What `make test` and `make test-all` do after the build: lint, GoogleTest, pytest, a summary.

    tools/run_tests.py [--all]

All three run whatever the one before said. The last line counts what passed, failed and was
skipped; the exit status is 1 if anything failed. --all adds the tests marked slow and, unless the
environment says otherwise, a million fuzz rounds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
CURRENT = ROOT / "build" / "current"
FUZZ_ROUNDS_ALL = "1000000"


@dataclass
class Outcome:
    name: str
    ok: bool
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        told = ", ".join(
            f"{self.counts[k]} {k}" for k in ("passed", "failed", "skipped", "disabled")
        )
        if not self.counts:
            told = "ok" if self.ok else "FAILED"
        elif not self.ok and not self.counts["failed"]:
            told += ", FAILED"
        return f"{self.name} {told} ({self.seconds:.0f} s)"


def count_junit(path: Path) -> Counter[str]:
    """Test cases of a file of pytest's or GoogleTest's by what became of them."""
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif case.get("status") == "notrun":
            counts["disabled"] += 1
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def run(name: str, command: list[str], results: Path | None = None) -> Outcome:
    """Runs one kind of test. `results`: an empty folder that the command fills with JUnit files."""
    print(f"\n---- {name} " + "-" * (90 - len(name)), flush=True)
    if results:
        results.mkdir(parents=True, exist_ok=True)
        for old in results.glob("*.xml"):
            old.unlink()
    start = time.monotonic()
    code = subprocess.call(command, cwd=ROOT)
    counts: Counter[str] = Counter()
    for path in results.glob("*.xml") if results else ():
        counts += count_junit(path)
    ok = code == 0 and not counts["failed"] and (results is None or counts["passed"] > 0)
    return Outcome(name, ok, time.monotonic() - start, counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--all", action="store_true", help="the slow tests and a million rounds too"
    )
    options = parser.parse_args()
    if options.all:
        os.environ.setdefault("NWOR_FUZZ_ROUNDS", FUZZ_ROUNDS_ALL)

    ctest = [str(BIN / "ctest"), "--test-dir", str(CURRENT), "--output-on-failure"]
    ctest += ["--no-tests=error", "--progress", "--parallel", str(len(os.sched_getaffinity(0)))]
    # A file stays with one worker: its tests share what they built.
    workers = str(min(8, len(os.sched_getaffinity(0))))
    pytest = [
        str(BIN / "python"),
        "-m",
        "pytest",
        "-q",
        f"--junitxml={CURRENT / 'pytest' / 'all.xml'}",
    ]
    pytest += ["--numprocesses", workers, "--dist", "loadfile"]
    if not options.all:
        pytest += ["-m", "not slow"]

    start = time.monotonic()
    outcomes = [
        run("lint", [str(ROOT / "tools" / "lint.sh")]),
        run("GoogleTest", ctest, CURRENT / "gtest"),
        run("pytest", pytest, CURRENT / "pytest"),
    ]
    passed = all(outcome.ok for outcome in outcomes)
    verdict = "PASSED" if passed else "FAILED"
    told = "; ".join(str(outcome) for outcome in outcomes)
    print(f"\n{verdict} in {time.monotonic() - start:.0f} s: {told}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
