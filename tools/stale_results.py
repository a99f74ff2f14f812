#!/usr/bin/env python3
"""Says which recorded results are older than the sources that they measure.

    tools/stale_results.py            one line: how many, and the oldest; `make lint` runs it
    tools/stale_results.py --verbose  each of them, and how many files have changed since its commit

benchmarks/results/recorded.toml names the sources. Without git, or where a commit is not in the
history, nothing is said. The exit status is always 0: a result says its commit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tables.recorded import Result, read_results
from tables.records import ROOT

# What the results of one device do not measure.
EXCLUDED = {
    "h200": ("csrc/*/cpu/*", "*_cpu.*"),
    "cpu": ("csrc/*/cuda/*", "*_cuda.*", "*.cu", "*.cuh"),
}


@dataclass(frozen=True)
class Stale:
    result: Result
    changed: int  # files of the sources
    time: int  # of the commit
    day: str


def git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def find_stale(results: list[Result]) -> list[Stale]:
    """The oldest first."""
    found = []
    for result in results:
        if not result.measures or not result.path.exists() or not result.revision:
            continue
        told = git("show", "--no-patch", "--format=%ct %cs", f"{result.revision}^{{commit}}")
        excluded = (f":(exclude){path}" for path in EXCLUDED[result.file.partition("/")[0]])
        names = git("diff", "--name-only", result.revision, "--", *result.measures, *excluded)
        if told and names:
            time, day = told.split()
            found.append(Stale(result, len(names.splitlines()), int(time), day))
    return sorted(found, key=lambda stale: (stale.time, stale.result.file))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--verbose", action="store_true", help="name each of them")
    options = parser.parse_args(arguments)
    found = find_stale(read_results())
    if found:
        oldest = found[0]
        hint = "" if options.verbose else "; tools/stale_results.py --verbose lists them"
        print(
            f"results: {len(found)} files are older than what they measure, the oldest is "
            f"{oldest.result.file} ({oldest.result.revision}, {oldest.day}){hint}"
        )
    if options.verbose:
        for stale in found:
            folders = ", ".join(stale.result.measures)
            told = f"{stale.result.file:36} {stale.result.revision} {stale.day}"
            print(f"  {told}  {stale.changed:3} files changed in {folders}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
