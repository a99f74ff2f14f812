"""Tests that one process runs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from . import launches, sanitizer

RUN_PYTEST = Path(__file__).resolve().parent / "run_pytest.py"
_LOG_END = 3000  # characters


@dataclass(eq=False)
class Shard:
    group: str
    check: str
    tests: list[str]
    python: str = sys.executable
    arguments: tuple[str, ...] = ()  # of pytest
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False  # nobody else may use the GPU

    log: Path = Path()
    begun: str | None = None  # the test that is running
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)  # those that have ended
    end: dict[str, Any] | None = None  # pytest has ended by itself
    news_at: float = 0.0  # when it was last heard of
    process: subprocess.Popen[bytes] | None = None
    _output: IO[str] | None = None
    _read: int = 0

    @property
    def sanitized(self) -> bool:
        return self.check in sanitizer.CHECKS

    @property
    def rest(self) -> list[str]:
        return [test for test in self.tests if test not in self.seen]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_end(self) -> str:
        return self.text[-_LOG_END:]

    def again(self, tests: list[str]) -> Shard:
        """Some of its tests in a new process."""
        names = ("group", "check", "python", "arguments", "environment", "alone")
        return Shard(tests=tests, **{name: getattr(self, name) for name in names})

    def start(self, root: Path, log: Path, until: float, threads: int) -> None:
        """With so many threads for what its tests compute on the host, unless the caller chose."""
        self.log = log
        command = sanitizer.command(self.check) if self.sanitized else []
        command += [self.python, str(RUN_PYTEST), str(self._lines), str(until)]
        command += ["-v", "-p", "no:cacheprovider", "-p", "no:xdist", *self.arguments]
        asked = {"NWOR_LAUNCHES": "1"} if self.check == launches.CHECK else {}
        self._output = log.open("w")
        self.news_at = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *self.tests],
            cwd=root,
            env={"OMP_NUM_THREADS": str(threads)} | os.environ | self.environment | asked,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def _lines(self) -> Path:
        return self.log.with_suffix(".jsonl")

    def poll(self) -> int | None:
        """The status of the process once it has ended; reads what it has written until then."""
        assert self.process is not None
        code = self.process.poll()
        if not self._lines.exists():
            return code
        with self._lines.open("rb") as file:
            file.seek(self._read)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read += len(whole) + 1
            self.news_at = time.monotonic()
        for line in whole.splitlines():
            self._take(json.loads(line))
        return code

    def _take(self, line: dict[str, Any]) -> None:
        if "begun" in line:
            self.begun = line["begun"]
        elif "test" in line:
            self.begun = None
            self.seen[line.pop("test")] = line
        elif "end" in line:
            self.end = line

    def stop(self) -> None:
        """Ends what still runs, children too."""
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self._output is not None:
            self._output.close()


def deal(shard: Shard, count: int) -> list[Shard]:
    """Its tests over so many processes. Neighbours take about as long, so they are separated."""
    parts = [({}, shard.tests)]
    if shard.check == "memcheck":
        captures = [test for test in shard.tests if sanitizer.CAPTURES.search(test)]
        others = [test for test in shard.tests if test not in captures]
        parts = [({}, captures), (sanitizer.NO_CACHE, others)]
    shards = []
    for environment, tests in parts:
        of_part = min(len(tests), max(1, round(count * len(tests) / len(shard.tests))))
        for index in range(of_part):
            part = shard.again(tests[index::of_part])
            shards.append(dataclasses.replace(part, environment=shard.environment | environment))
    return shards
