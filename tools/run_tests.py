#!/usr/bin/env python3
"""What `make test`, `test-vllm` and `test-all` do after the build: lint, tests, a summary.

    tools/run_tests.py [--all] [--vllm [VERSION] [--quick]]

Lint, GoogleTest, pytest and the tests of vLLM all run, whatever failed before. The newest vLLM runs
all its tests beside pytest, since both together hardly keep two cores busy; after pytest the older
versions run those marked quick. The last line counts what passed, failed and was skipped; the exit
status is 1 if anything failed. --all adds clang-tidy, the tests marked slow, all tests on every
version of vLLM and, unless NWOR_FUZZ_ROUNDS is set, a million fuzz rounds. --vllm runs only the
tests of vLLM, of the newest version unless one is named; with --quick those marked so.

NWOR_TEST_SEED decides random cases. Unless it is set, it is computed from the sources, so that the
same sources give the same verdict; with --all every test draws its own seed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
CURRENT = ROOT / "build" / "current"
GPU = Path("/dev/nvidiactl")
VLLM_PROCESSES = 2
FUZZ_ROUNDS_ALL = "1000000"
NO_TIDY = "--no-clang-tidy"  # it takes minutes: left to `make lint` and `make test-all`
SOURCES = ("csrc", "python", "tests", "examples")
SOURCE_SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}


@dataclass
class Outcome:
    name: str
    ok: bool
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        text = ", ".join(
            f"{self.counts[k]} {k}" for k in ("passed", "failed", "skipped", "disabled")
        )
        if not self.counts:
            text = "ok" if self.ok else "FAILED"
        elif not self.ok and not self.counts["failed"]:
            text += ", FAILED"
        return f"{self.name} {text} ({self.seconds:.0f} s)"


def count_junit(path: Path) -> Counter[str]:
    """Counts the test cases of a JUnit file of pytest or GoogleTest by their outcome."""
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


def run(
    name: str, command: list[str], results: Path | None = None, log: Path | None = None
) -> Outcome:
    """Runs one kind of test. `results`: a folder that the command fills with JUnit files.

    The output is printed at once, or goes to `log`.
    """
    title = f"\n---- {name} " + "-" * (90 - len(name))
    if log is None:
        print(title, flush=True)
    if results:
        results.mkdir(parents=True, exist_ok=True)
        for old in results.glob("*.xml"):
            old.unlink()
    start = time.monotonic()
    if log is None:
        code = subprocess.call(command, cwd=ROOT)
    else:
        with log.open("w") as output:
            output.write(f"{title}\n")
            output.flush()
            code = subprocess.call(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    counts: Counter[str] = Counter()
    for path in results.glob("*.xml") if results else ():
        counts += count_junit(path)
    ok = code == 0 and not counts["failed"] and (results is None or counts["passed"] > 0)
    return Outcome(name, ok, time.monotonic() - start, counts)


def digest_of(root: Path, parts: Iterable[str] = SOURCES) -> str:
    """Of all sources: the same ones give the same digest anywhere."""
    sources = (p for part in parts for p in (root / part).rglob("*"))
    digest = hashlib.sha256()
    for path in sorted(p for p in sources if p.suffix in SOURCE_SUFFIXES):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def seed_of(root: Path) -> int:
    """A number computed from all sources."""
    return int(digest_of(root)[:8], 16) >> 1  # any generator takes 31 bits


def cores() -> int:
    return len(os.sched_getaffinity(0))


def workers() -> int:
    """The number of pytest processes."""
    return min(8, cores())


def run_googletest() -> Outcome:
    command = [str(BIN / "ctest"), "--test-dir", str(CURRENT), "--output-on-failure"]
    command += ["--no-tests=error", "--progress", "--parallel", str(cores())]
    return run("GoogleTest", command, CURRENT / "gtest")


def run_pytest(*, slow: bool) -> Outcome:
    results = CURRENT / "pytest"
    command = [str(BIN / "python"), "-m", "pytest", "-q", f"--junitxml={results / 'all.xml'}"]
    # A file stays with one worker: its tests share what they built.
    command += ["--numprocesses", str(workers()), "--dist", "loadfile"]
    return run("pytest", command + ([] if slow else ["-m", "not slow"]), results)


def vllm_versions() -> list[str]:
    """Those that have an environment for the CPU, the oldest first."""
    names = (path.stem.partition("-")[2] for path in (ROOT / "requirements").glob("vllm-*.txt"))
    return sorted(names, key=lambda name: tuple(map(int, name.split("."))))


def run_vllm(version: str, *, slow: bool, quick: bool = False, log: Path | None = None) -> Outcome:
    """In few processes, because importing vLLM takes longer than starting an engine."""
    python = ROOT / f".venv-vllm-{version}" / "bin" / "python"
    results = CURRENT / f"vllm-{version}"
    command = [str(python), "-m", "pytest", "-q", f"--junitxml={results / 'all.xml'}"]
    folder = ROOT / "tests" / "vllm"
    command += ["-c", str(folder / "pytest.ini"), str(folder)]
    chosen = [word for word, taken in (("not slow", not slow), ("quick", quick)) if taken]
    command += ["-m", " and ".join(chosen)] if chosen else []
    if not quick and not GPU.exists():
        command += ["--numprocesses", str(min(VLLM_PROCESSES, cores())), "--dist", "loadfile"]
    return run(f"vLLM {version}", command, results, log)


def run_vllms(versions: Iterable[str], *, slow: bool, logs: Path | None = None) -> list[Outcome]:
    """All tests on the newest version, the quick ones on the others; with the slow tests all."""
    newest = vllm_versions()[-1]
    return [
        run_vllm(
            version,
            slow=slow,
            quick=not slow and version != newest,
            log=logs and logs / f"vllm-{version}.log",
        )
        for version in versions
    ]


def run_side_by_side(*, slow: bool) -> list[Outcome]:
    """The newest vLLM beside pytest and the older ones.

    On a GPU one after the other, since some tests measure its free memory.
    """
    *older, newest = vllm_versions()
    if GPU.exists():
        return [run_pytest(slow=slow), *run_vllms([newest, *older], slow=slow)]
    print("\nThe tests of vLLM run at the same time as pytest. Their output goes to")
    print(f"{CURRENT}/vllm-*.log and is printed here when all are done.")
    with ThreadPoolExecutor(max_workers=1) as pool:
        beside = pool.submit(run_vllms, [newest], slow=slow, logs=CURRENT)
        outcomes = [run_pytest(slow=slow)]
        after = run_vllms(older, slow=slow, logs=CURRENT)
        outcomes += [*beside.result(), *after]
    for version in vllm_versions():
        log = CURRENT / f"vllm-{version}.log"
        if log.is_file():
            print(log.read_text(errors="replace"), flush=True)
    return outcomes


def prepare_environment() -> None:
    """What every kind of test inherits."""
    # Several processes share the cores, and waiting OpenMP threads would spin.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // workers())))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Tests start servers on loopback, which no web proxy can reach.
    kept = [name for name in (os.environ.get("no_proxy"), os.environ.get("NO_PROXY")) if name]
    os.environ["no_proxy"] = ",".join([*kept, "127.0.0.1", "::1", "localhost"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--all", action="store_true", help="also clang-tidy, slow tests and a million fuzz rounds"
    )
    parser.add_argument(
        "--vllm",
        nargs="?",
        const=vllm_versions()[-1],
        choices=vllm_versions(),
        metavar="VERSION",
        help="only the tests on the real vLLM, by default on the newest one",
    )
    parser.add_argument("--quick", action="store_true", help="of these only those marked quick")
    options = parser.parse_args()
    if options.all:
        os.environ.setdefault("NWOR_FUZZ_ROUNDS", FUZZ_ROUNDS_ALL)
    else:
        os.environ.setdefault("NWOR_TEST_SEED", str(seed_of(ROOT)))
        print(f"random cases: NWOR_TEST_SEED={os.environ['NWOR_TEST_SEED']}")

    prepare_environment()
    start = time.monotonic()
    if options.vllm:
        outcomes = [run_vllm(options.vllm, slow=options.all, quick=options.quick)]
    else:
        outcomes = [
            run("lint", [str(ROOT / "tools" / "lint.sh"), *([] if options.all else [NO_TIDY])]),
            run_googletest(),
            *run_side_by_side(slow=options.all),
        ]
    passed = all(outcome.ok for outcome in outcomes)
    verdict = "PASSED" if passed else "FAILED"
    summary = "; ".join(str(outcome) for outcome in outcomes)
    print(f"\n{verdict} in {time.monotonic() - start:.0f} s: {summary}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
