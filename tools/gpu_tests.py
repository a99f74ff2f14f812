#!/usr/bin/env python3
"""The tests that need a GPU, plain and under compute-sanitizer, several processes at once.

    tools/gpu_tests.py [--checks plain memcheck racecheck synccheck] [--jobs 4] [--minutes 30]
                       [--json FILE] [-k EXPRESSION] [PATHS ...]

Every check spreads the tests over `jobs` processes. All checks run at the same time and share the
cores. Tests that have not run when the time is up are counted, and the file of --json names them;
it also has the sanitizer's first findings, each with its test. The sanitizer checks this project's
kernels only. Launches that it could not check, for example for want of memory, are no findings, but
they are no success either: fewer processes need less memory. The exit status is 0 if in every check
every test passed or said why it skips, every launch was checked, and nothing was found. Without a
GPU or without the sanitizer nothing runs and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "racecheck", "synccheck")
DEFAULT_PATHS = [f"tests/python/{name}" for name in ("attention", "kv_interceptor", "specpv",
                 "tree", "decoder", "transformers")]  # fmt: skip
DEFAULT_TESTS = "cuda or graph or captured or kernels or torch_ops"
# torch's caching would hide accesses beyond a tensor, but graphs cannot be captured without it.
_CAPTURES = re.compile(r"graph|captur|bench")
_BARRIERS = ("--num-cuda-barriers", "65536", "--force-synchronization-limit", "16")
_NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_FOUND = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_VERDICT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", re.MULTILINE)
# Again at the end: a sanitizer may have spoken between a test's name and its verdict.
_AT_END = re.compile(r"^(PASSED|FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)
_UNSEEN = "Internal Sanitizer Error"  # of the tool itself, though its summary counts it
_SAID = re.compile(r"(?<!=)={9} (?! )(?!COMPUTE-SANITIZER|.* SUMMARY:|Target )(.+)")
_KINDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped",
          "XFAIL": "skipped"}  # fmt: skip


@dataclass
class Shard:
    """Tests that one process runs, and what it wrote."""

    check: str
    tests: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen | None = None
    output: IO[str] | None = None

    def start(self, threads: int) -> None:
        """With so many threads for what its tests compute on the host, unless the caller chose."""
        command = [sys.executable, "-m", "pytest", "-v", "-rpfE", "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist"]
        if self.check in SANITIZERS:
            command = [
                *("compute-sanitizer", "--tool", self.check, "--kernel-name", "kns=nwor"),
                # To know the host's stack it keeps frames of Python, and with them their objects.
                *("--show-backtrace", "device"),
                # It has memory for so many barriers of every launch that nobody has waited for.
                *(_BARRIERS if self.check == "synccheck" else ()),
                *("--print-limit", "10000", "--error-exitcode", "9", *command),
            ]
        self.output = self.log.open("w")
        self.process = subprocess.Popen(
            [*command, *self.tests],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": str(threads)} | os.environ | self.environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop(self) -> None:
        """Ends what still runs, children too."""
        assert self.process is not None
        assert self.output is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.output.close()


@dataclass
class Outcome:
    """Of one check: tests by what became of them, and the sanitizer's findings."""

    check: str
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    findings: int = 0
    unseen: int = 0  # launches that the sanitizer could not check
    troubles: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # by the sanitizer, the first lines

    @property
    def ok(self) -> bool:
        bad = self.counts["failed"] + self.counts["not run"] + len(self.troubles)
        return not (bad or self.findings or self.unseen) and self.counts["passed"] > 0

    def take(self, shard: Shard) -> None:
        assert shard.process is not None
        text = shard.log.read_text(errors="replace")
        seen: dict[str, str] = {}
        verdicts = _VERDICT.findall(text)
        verdicts += [(name, verdict) for verdict, name in _AT_END.findall(text)]
        for name, verdict in verdicts:
            kind = _KINDS[verdict]
            if seen.get(name) != "failed":  # its teardown may have failed as well
                seen[name] = kind
        self.counts += Counter(seen.values())
        not_run = [name for name in shard.tests if name not in seen]
        self.counts["not run"] += len(not_run)
        self.not_run += not_run
        if shard.check in SANITIZERS:
            self.said += first_words(text, shard.tests)
        summaries = [int(errors or hazards) for errors, hazards in _FOUND.findall(text)]
        unseen = text.count(f"========= {_UNSEEN}")
        self.unseen += unseen
        self.findings += max(0, sum(summaries) - unseen)
        failed = [name for name, kind in seen.items() if kind == "failed"]
        self.troubles += [f"failed: {name}" for name in failed]
        code = shard.process.returncode
        ended = code == 0 or (code in (1, 9) and (failed or sum(summaries)))
        if not ended:
            self.troubles.append(f"a process ended with {code}, see {shard.log}")
        elif shard.check in SANITIZERS and not summaries:
            self.troubles.append(f"{shard.check} printed no summary, see {shard.log}")

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self.counts.items()) if n)
        found = f", {self.findings} findings" if self.check in SANITIZERS else ""
        found += f", {self.unseen} launches not checked" if self.unseen else ""
        return f"{self.check}: {counts}{found} ({self.seconds:.0f} s)"


def first_words(text: str, tests: list[str], most: int = 20) -> list[str]:
    """The first lines of findings, each behind the test in which it came."""
    found: list[str] = []
    current = "before any test"
    for line in text.splitlines():
        # Of test_a[1] and test_a[1]b the longer one; lines of tracebacks are none.
        current = max((t for t in tests if line.startswith(f"{t} ")), key=len, default=current)
        said = _SAID.search(line)
        if said and not said[1].startswith(_UNSEEN) and len(found) < most:
            found.append(f"{current}: {said[1]}")
    return found


def refusal(checks: list[str]) -> str | None:
    """Why these checks cannot run here."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device here"
    if set(checks) & set(SANITIZERS) and shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on the PATH; it is in the CUDA toolkit (or --checks plain)"
    return None


def collect(paths: list[str], expression: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-k", expression, *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not tests:
        sys.exit(f"gpu_tests: no tests were collected\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return tests


def deal(check: str, tests: list[str], jobs: int, folder: Path) -> list[Shard]:
    """Neighbours take about as long, so they go to different processes."""
    parts = [({}, tests)]
    if check == "memcheck":
        captures = [test for test in tests if _CAPTURES.search(test)]
        parts = [({}, captures), (_NO_CACHE, [test for test in tests if test not in captures])]
    shards: list[Shard] = []
    for environment, part in parts:
        count = min(len(part), max(1, round(jobs * len(part) / len(tests))))
        for index in range(count):
            log = folder / f"{check}_{len(shards)}.log"
            shards.append(Shard(check, part[index::count], environment, log))
    return shards


def run(
    checks: list[str], tests: list[str], jobs: int, seconds: float, logs: Path
) -> list[Outcome]:
    shards = [shard for check in checks for shard in deal(check, tests, jobs, logs)]
    start = time.monotonic()
    ends: dict[str, float] = {}
    asked: list[int] = []  # signals to end: what has run by then is reported
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        threads = max(1, len(os.sched_getaffinity(0)) // len(shards))
        for shard in shards:
            shard.start(threads)
        while time.monotonic() - start < seconds and not asked:
            running = {s.check for s in shards if s.process and s.process.poll() is None}
            for check in set(checks) - running - ends.keys():
                ends[check] = time.monotonic() - start
            if not running:
                break
            time.sleep(0.2)
    finally:
        for shard in shards:
            if shard.process is not None:
                shard.stop()
        signal.signal(signal.SIGTERM, before)
    took = time.monotonic() - start
    outcomes = []
    for check in checks:
        outcome = Outcome(check, ends.get(check, took))
        for shard in shards:
            if shard.check == check:
                outcome.take(shard)
        outcomes.append(outcome)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = ("plain", *SANITIZERS)
    parser.add_argument("--checks", nargs="+", choices=known, default=list(known))
    parser.add_argument("--jobs", type=int, default=4, help="processes of a check (default: 4)")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit (default: 30)")
    parser.add_argument("--logs", type=Path, help="a folder for the output of the processes")
    parser.add_argument("--json", type=Path, help="a file for the outcome")
    parser.add_argument("-k", dest="expression", default=DEFAULT_TESTS, help="as pytest takes it")
    parser.add_argument("paths", nargs="*", default=DEFAULT_PATHS)
    options = parser.parse_args()

    if why := refusal(options.checks):
        sys.exit(f"gpu_tests: {why}")
    tests = collect(options.paths, options.expression)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="nwor_gpu_tests_"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(tests)} tests, {options.jobs} processes for each of {options.checks}; {logs}")
    outcomes = run(options.checks, tests, max(1, options.jobs), 60 * options.minutes, logs)
    for outcome in outcomes:
        print(outcome)
        for line in outcome.troubles + outcome.said[:20]:
            print(f"  {line}")
    if options.json:
        records = [vars(outcome) | {"ok": outcome.ok} for outcome in outcomes]
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
