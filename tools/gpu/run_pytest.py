#!/usr/bin/env python3
"""pytest with a line of JSON for everything that happens: what gpu_tests.py runs in each process.

    tools/gpu/run_pytest.py FILE UNTIL [arguments of pytest]

No test begins after UNTIL, in seconds since 1970 (0: no limit). FILE says which tests were found,
which one has begun, what became of each, and that pytest has ended by itself. With NWOR_LAUNCHES in
the environment also which of our kernels each has launched.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launches import Profile

NEEDS_A_GPU = "no CUDA device"  # the reason for which such tests are skipped elsewhere
_REPORT, _PRINTED = 3000, 1500  # characters that are kept, the last ones


class Lines:
    """Writes the file, line by line."""

    def __init__(self, path: Path, until: float) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._until = until
        self._reports: list[pytest.TestReport] = []
        self._session: pytest.Session | None = None
        self._stopped = False
        self._profile: Profile | None = None

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session
        if session.config.option.collectonly:
            for item in session.items:
                alone = item.get_closest_marker("alone") is not None
                serves = [" on ".join(mark.args) for mark in item.iter_markers("serves")]
                self._write(found=item.nodeid, alone=alone, gpu=needs_gpu(item), serves=serves)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self._write(begun=nodeid)
        if "NWOR_LAUNCHES" in os.environ:
            self._profile = Profile()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = [report.outcome for report in self._reports]
        outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
        seconds = round(sum(report.duration for report in self._reports), 2)
        text = "\n".join(told(r) for r in self._reports if r.outcome == outcome != "passed")
        launches = {} if self._profile is None else {"launches": self._profile.names()}
        self._write(test=nodeid, outcome=outcome, seconds=seconds, text=text, **launches)
        if self._until and time.time() > self._until and self._session is not None:
            self._session.shouldstop = "the time is up"
            self._stopped = True

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(end=int(exitstatus), stopped=self._stopped)


def needs_gpu(item: pytest.Item) -> bool:
    reasons = (mark.kwargs.get("reason") for mark in item.iter_markers("skipif"))
    return NEEDS_A_GPU in reasons


def told(report: pytest.TestReport) -> str:
    """Why it failed, and the end of what it printed; or why it was skipped."""
    if report.outcome == "skipped":
        return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    parts = [report.longreprtext[-_REPORT:]]
    for name in ("capstdout", "capstderr", "caplog"):
        if printed := getattr(report, name):
            parts.append(f"---- {name} ----\n{printed[-_PRINTED:]}")
    return "\n".join(parts)


if __name__ == "__main__":
    file, until, *arguments = sys.argv[1:]
    sys.path[0] = os.getcwd()  # as python -m pytest has it
    sys.exit(pytest.main(arguments, plugins=[Lines(Path(file), float(until))]))
