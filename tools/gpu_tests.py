#!/usr/bin/env python3
"""The tests that need a GPU: kernels, worker and engine, vLLM, and kernels under compute-sanitizer.

    tools/gpu_tests.py [--groups kernels host vllm sanitizers] [--minutes 9] [--jobs 16]
                       [--checks memcheck racecheck synccheck] [--all-tests] [--json FILE]
                       [--only TEXT] [--retry] [--vllm-python PYTHON]

Many processes run at once. Tests of vLLM have processes of their own, of one file each and as many
as memory allows: vLLM keeps it until its process ends. FILE is extended by every call: what has run
for the same sources, device and versions is not run again, except, with --retry, what has failed.
With --minutes a call ends in time. The exit status is 0 when all tests of these groups have passed
or said why they skip, every launch was checked and nothing was found, 75 while tests are left, else
1. The sanitizer checks this project's kernels only.

Sanitizers need tens of times as long as a plain run, and most parameters of a test repeat kernels
that others have launched. So a run under torch's profiler (`launches`) first says which test
launches which kernel, by name with all template arguments. Sanitizers then look at one set of
parameters of every test function, since functions differ in what they hand to a kernel, and at as
many more tests as it takes to launch every instantiation that any test launches. --all-tests has
them look at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import launches, sanitizer
from gpu.results import Key, Results
from gpu.shards import RUN_PYTEST, Shard, deal
from run_tests import digest_of

ROOT = Path(__file__).resolve().parent.parent
KERNEL_FOLDERS = ("attention", "decoder", "deploy", "drafters", "kv_interceptor", "profiling",
                  "specpv", "transformers", "tree")  # fmt: skip
# Whole models, and ranks in processes of their own: kernels have other tests, and under a sanitizer
# these take minutes.
NOT_SANITIZED = (
    "tests/python/transformers/",
    "tests/python/kv_interceptor/test_cuda_agreement.py",
)
# Names of tests that run kernels; those that are skipped without a GPU are taken as well.
KERNEL_TESTS = re.compile("cuda|graph|captured|kernels|torch_ops")
VLLM_GIB = 20  # an engine of the tests takes up to a tenth of the GPU, and says so at start
_SAVE_SECONDS = 5.0
_FEWEST = 10  # tests of a process, which takes seconds to start
_MOST_OF_VLLM = 4  # tests of a process: engines start slowly, and processes run at once


@dataclass(frozen=True)
class Group:
    paths: tuple[str, ...]
    arguments: tuple[str, ...] = ()  # of pytest
    of_kernels: bool = False


GROUPS = {
    "kernels": Group(tuple(f"tests/python/{name}" for name in KERNEL_FOLDERS), of_kernels=True),
    "host": Group(("tests/python/worker", "tests/python/engine"), ("-m", "not slow")),
    "vllm": Group(("tests/vllm/cuda",), ("-c", "tests/vllm/pytest.ini", "--rootdir", ".")),
}
SANITIZERS = "sanitizers"  # over the tests of `kernels`

# What the interpreter that runs it has; vLLM itself is not imported, which takes half a minute.
PROBE = """
import json, platform, sys
from importlib import metadata
import torch
import nwor_specpv
from nwor_specpv import _stamp
try:
    vllm = metadata.version("vllm")
except metadata.PackageNotFoundError:
    vllm = None
stamp = _stamp.read_stamp()
plugins = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
print(json.dumps({
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "torch": torch.__version__,
    "vllm": vllm,
    "python": platform.python_version(),
    "library": {"torch": stamp.torch, "cuda": stamp.cuda, "for": " ".join(stamp.architectures)},
    "revision": stamp.revision,
    "plugin": "nwor_specpv" in plugins,
}))
"""


def probe(python: str) -> dict[str, Any]:
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"gpu_tests: {python}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def refusal(found: dict[str, Any], vllm: dict[str, Any], groups: Iterable[str]) -> str | None:
    """Why these groups cannot run here."""
    if found["device"] is None:
        return "no CUDA device here"
    if not found["library"]["cuda"]:
        return "the library was built without CUDA kernels: run make build where nvcc is"
    if SANITIZERS in groups and shutil.which("compute-sanitizer") is None:
        return (
            "compute-sanitizer is not on the PATH; it is in the CUDA toolkit (or leave the group "
            "sanitizers out)"
        )
    if "vllm" in groups and (vllm["vllm"] is None or vllm["device"] is None):
        return (
            "the group vllm needs vLLM for GPUs: --vllm-python PYTHON, of an environment that has "
            "it and this package (or leave the group out)"
        )
    if "vllm" in groups and not vllm["plugin"]:
        return "vLLM finds no plugin nwor_specpv: install this package in its environment"
    return None


def git(*arguments: str) -> str | None:
    """What git says of the checkout; None where there is none."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def nvidia_smi(what: str) -> str | None:
    """A value of the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def setting_of(found: dict[str, Any], vllm: dict[str, Any], revision: str) -> dict[str, Any]:
    """What the results are of."""
    changes = git("status", "--porcelain")
    return {
        "device": found["device"],
        "driver": nvidia_smi("driver_version"),
        "torch": found["torch"],
        "vllm": vllm["vllm"],
        "python": found["python"],
        "library": found["library"],
        "commit": revision or git("rev-parse", "--short=12", "HEAD") or found["revision"],
        "dirty": None if changes is None else bool(changes),
        "sources": digest_of(ROOT),
    }


# ---- which tests ----


def collect(groups: dict[str, str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The tests of these groups, each of which is collected by an interpreter, all at once."""
    running = {}
    for name, python in groups.items():
        group, lines = GROUPS[name], folder / f"collect_{name}.jsonl"
        command = [python, str(RUN_PYTEST), str(lines), "0", "--collect-only", "-q"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", *group.arguments, *group.paths]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running[name] = process, lines
    found = {}
    for name, (process, lines) in running.items():
        output, _ = process.communicate()
        told = [json.loads(line) for line in lines.read_text().splitlines()]
        found[name] = [line for line in told if "found" in line]
        if GROUPS[name].of_kernels:
            tests = found[name]
            found[name] = [t for t in tests if t["gpu"] or KERNEL_TESTS.search(t["found"])]
        if process.returncode or not found[name]:
            sys.exit(f"gpu_tests: no tests of {name} were collected\n{output[-3000:]}")
    return found


def checks_of(groups: Iterable[str], sanitizers: list[str]) -> dict[str, list[str]]:
    """The checks of these groups by the group whose tests they run."""
    found: dict[str, list[str]] = {}
    for group in groups:
        of_kernels = group == SANITIZERS
        found.setdefault("kernels" if of_kernels else group, []).extend(
            sanitizers if of_kernels else ["plain"]
        )
    return found


def shards_of(keys: list[Key], alone: list[str], vllm_python: str, jobs: int) -> list[Shard]:
    """Processes for these tests: those that want the GPU for themselves first, then vLLM's."""
    named: dict[tuple[str, str], list[str]] = {}
    for group, check, test in keys:
        named.setdefault((group, check), []).append(test)
    kinds = sum(GROUPS[group].of_kernels for group, _ in named)
    shards = []
    for (group, check), tests in named.items():
        whole = Shard(group, check, tests, arguments=GROUPS[group].arguments)
        if GROUPS[group].of_kernels:
            most = math.ceil(len(tests) / _FEWEST)
            shards += deal(whole, min(most, max(1, 2 * jobs // kinds)))
            continue
        if group == "vllm":
            whole.python = vllm_python
        files: dict[str, list[str]] = {}
        for test in tests:
            if test in alone:
                shards.append(dataclasses.replace(whole.again([test]), alone=True))
            else:  # tests of a file share what they have built
                files.setdefault(test.partition("::")[0], []).append(test)
        for of_file in files.values():
            most = _MOST_OF_VLLM if group == "vllm" else len(of_file)
            count = math.ceil(len(of_file) / most)
            shards += [whole.again(of_file[i::count]) for i in range(count)]
    order = {"vllm": 0, "kernels": 1, "host": 2}
    shards.sort(key=lambda s: (not s.alone, s.sanitized, order[s.group]))
    return shards


# ---- running them ----


@dataclass
class Limits:
    jobs: int
    seconds: float = 0.0  # of this call; 0: no limit
    test_seconds: float = 300.0  # without news from a process

    @property
    def grace(self) -> float:
        """Before the end no further test begins."""
        return min(60.0, 0.1 * self.seconds)


class Pool:
    """Runs processes, so many at once."""

    def __init__(self, results: Results, limits: Limits, logs: Path) -> None:
        self._results, self._limits, self._logs = results, limits, logs
        self._running: list[Shard] = []
        self._count = 0

    def run(self, waiting: list[Shard]) -> None:
        """Until all is done, or the time is up, or the tool is asked to end."""
        limits, began, asked = self._limits, time.monotonic(), []
        until = time.time() + limits.seconds - limits.grace if limits.seconds else 0.0
        before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        saved = began
        try:
            while waiting or self._running:
                waiting[:0] = self._look()
                now = time.monotonic()
                if asked or (limits.seconds and now - began > limits.seconds):
                    break
                if not limits.seconds or now - began < limits.seconds - limits.grace:
                    self._start_some(waiting, until)
                elif not self._running:
                    break
                if now - saved > _SAVE_SECONDS:
                    self._results.save()
                    saved = now
                time.sleep(0.2)
        finally:
            for shard in self._running:
                shard.stop()
                shard.poll()
                self._results.close(shard, None, "")
            self._results.save()
            signal.signal(signal.SIGTERM, before)

    def _look(self) -> list[Shard]:
        """Takes what was written; shards that processes owe which are over are returned."""
        owed = []
        for shard in list(self._running):
            code, why = shard.poll(), ""
            if code is None and time.monotonic() - shard.news_at > self._limits.test_seconds:
                why = f"no news for {self._limits.test_seconds:.0f} s"
                shard.stop()
                shard.poll()
            if code is None and not why:
                self._results.take(shard)
                continue
            shard.stop()
            self._running.remove(shard)
            owed += self._results.close(shard, code, why)
        return owed

    def _start_some(self, waiting: list[Shard], until: float) -> None:
        for shard in list(waiting):
            if len(self._running) >= self._limits.jobs or any(s.alone for s in self._running):
                return
            if not self._fits(shard):
                continue
            waiting.remove(shard)
            log = self._logs / f"{self._count}_{shard.group}_{shard.check}.log"
            self._count += 1
            threads = max(1, len(os.sched_getaffinity(0)) // self._limits.jobs)
            shard.start(ROOT, log, until, threads)
            self._running.append(shard)

    def _fits(self, shard: Shard) -> bool:
        if not self._running:
            return True
        if shard.alone:
            return False
        if shard.group != "vllm":
            return True
        free = nvidia_smi("memory.free")  # MiB
        others = sum(other.group == "vllm" for other in self._running)  # may not have it all yet
        return free is not None and float(free) > 1024 * VLLM_GIB * (1 + others)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    groups = [*GROUPS, SANITIZERS]
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--checks", nargs="+", choices=sanitizer.CHECKS, default=sanitizer.CHECKS,
                        help="of the sanitizers")  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=min(16, cores), help="processes at once")
    parser.add_argument("--all-tests", action="store_true", help="under the sanitizers, too")
    parser.add_argument("--minutes", type=float, default=0, help="of this call; 0: no limit")
    parser.add_argument("--test-minutes", type=float, default=5, help="of a single test")
    parser.add_argument("--only", default="", help="tests with this in their names")
    parser.add_argument("--retry", action="store_true", help="run again what has failed")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu_tests.json")
    parser.add_argument("--logs", type=Path, help="a folder for the output of the processes")
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--revision", default="", help="commit, where git does not know it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    found = probe(sys.executable)
    same = options.vllm_python == sys.executable
    vllm = found if same else probe(options.vllm_python)
    if why := refusal(found, vllm, options.groups):
        sys.exit(f"gpu_tests: {why}")
    logs = options.logs or Path(tempfile.mkdtemp(prefix="nwor_gpu_tests_"))
    for folder in (logs, options.json.parent):
        folder.mkdir(parents=True, exist_ok=True)
    results = Results(options.json, setting_of(found, vllm, options.revision))
    if options.retry:
        results.forget_failures()

    def run(checks: dict[str, list[str]]) -> list[Key]:
        """The tests of these checks, which have run as far as there was time."""
        keys = [key for key in results.tests if key[1] in checks.get(key[0], ())]
        keys = [key for key in keys if options.only in key[2]]
        left = results.pending(keys)
        print(f"{len(left)} of {len(keys)} tests are left; output: {logs}", flush=True)
        limits = Limits(max(1, options.jobs), 60 * options.minutes, 60 * options.test_minutes)
        if options.minutes:
            limits.seconds = max(1.0, limits.seconds - (time.monotonic() - began))
        pool = Pool(results, limits, logs)
        pool.run(shards_of(left, results.alone, options.vllm_python, options.jobs))
        return keys

    chooses = SANITIZERS in options.groups and not options.all_tests
    first = checks_of(options.groups, [launches.CHECK] if chooses else options.checks)
    find_tests(results, first, options.vllm_python, logs)
    keys = run(first)
    if chooses and not results.pending(keys):
        tests = results.sanitized("kernels")
        if not tests:
            sys.exit("gpu_tests: torch's profiler has seen no launch of ours; try --all-tests")
        count = len(results.kernels)
        print(f"sanitizers: {len(tests)} tests launch the {count} kernels that all do", flush=True)
        results.plan("kernels", options.checks, tests)
        keys += run({"kernels": options.checks})
    for line in results.told(keys):
        print(line)
    print(f"written to {options.json}")
    return results.verdict(keys)


def find_tests(
    results: Results, checks: dict[str, list[str]], vllm_python: str, logs: Path
) -> None:
    """Has the file name all tests of these checks."""
    unknown = {
        name: vllm_python if name == "vllm" else sys.executable
        for name, wanted in checks.items()
        if any((name, check) not in {key[:2] for key in results.tests} for check in wanted)
    }
    for name, tests in collect(unknown, logs).items():
        names = [test["found"] for test in tests]
        for check in checks[name]:
            of_kernels = (test for test in names if not test.startswith(NOT_SANITIZED))
            results.plan(name, [check], names if check == "plain" else list(of_kernels))
        results.alone += [test["found"] for test in tests if test["alone"]]
        results.serves |= {test["found"]: test["serves"] for test in tests if test["serves"]}


if __name__ == "__main__":
    sys.exit(main())
