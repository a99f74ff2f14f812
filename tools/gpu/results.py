"""The file of results: what became of each test in each check, and what sanitizers have found."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import launches
from .sanitizer import read
from .shards import Shard

UNFINISHED = 75
NOT_RUN, PASSED, FAILED, SKIPPED = "not run", "passed", "failed", "skipped"
# Results of other values of these are of no use: the file is begun anew.
IDENTITY = ("sources", "device", "torch", "vllm", "python", "library")

Key = tuple[str, str, str]  # group, check, test


class Results:
    def __init__(self, path: Path, setting: dict[str, Any]) -> None:
        self._path = path
        self.setting = setting
        self.tests: dict[Key, dict[str, Any]] = {}
        self.findings: list[dict[str, Any]] = []
        self.alone: list[str] = []  # tests that want a GPU for themselves
        self.serves: dict[str, list[str]] = {}  # what tests of vLLM stand for
        self.kernels: list[str] = []  # names, whose places here tests give for their launches
        if path.exists():
            self._load(json.loads(path.read_text(encoding="utf-8")))

    def _load(self, data: dict[str, Any]) -> None:
        other = [name for name in IDENTITY if data["setting"][name] != self.setting[name]]
        if other:
            aside = self._path.with_suffix(".earlier.json")
            self._path.replace(aside)
            print(f"{self._path} was of another state ({', '.join(other)}): it is {aside.name} now")
            return
        for entry in data["tests"]:
            self.tests[entry["group"], entry["check"], entry["test"]] = entry
        self.findings, self.alone = data["findings"], data["alone"]
        self.serves = data.get("serves", {})
        self.kernels = data.get("kernels", [])

    def save(self) -> None:
        """One test a line; a reader never finds half a file."""
        parts = [f'"setting": {json.dumps(self.setting, indent=1)}']
        parts.append(f'"alone": {json.dumps(self.alone)}')
        parts.append(f'"serves": {json.dumps(self.serves)}')
        listed = {"tests": self.tests.values(), "findings": self.findings, "kernels": self.kernels}
        for name, rows in listed.items():
            lines = ",\n".join(json.dumps(row) for row in rows)
            parts.append(f'"{name}": [\n{lines}\n]')
        new = self._path.with_suffix(".new")
        new.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
        os.replace(new, self._path)

    # ---- what there is to run ----

    def plan(self, group: str, checks: Iterable[str], tests: list[str]) -> None:
        for check in checks:
            for test in tests:
                if (group, check, test) not in self.tests:
                    self._put(group, check, test, NOT_RUN)

    def _put(self, group: str, check: str, test: str, outcome: str, **more: Any) -> None:
        entry = {"group": group, "check": check, "test": test, "outcome": outcome}
        self.tests[group, check, test] = entry | {k: v for k, v in more.items() if v != ""}

    def pending(self, keys: Iterable[Key]) -> list[Key]:
        return [key for key in keys if self.tests[key]["outcome"] == NOT_RUN]

    def forget_failures(self) -> None:
        """Tests that have failed, or in which something was found, are pending again."""
        again = {key for key, entry in self.tests.items() if entry["outcome"] == FAILED}
        for found in self.findings:
            again |= {(found["group"], found["check"], test) for test in found["tests"]}
        for key in again:
            self._put(*key, NOT_RUN)
        self.findings = []

    def sanitized(self, group: str) -> list[str]:
        """The group's tests that sanitizers look at. REQUIRES: its launches are known."""
        entries = [e for key, e in self.tests.items() if key[:2] == (group, launches.CHECK)]
        launched = {e["test"]: e.get("launches", []) for e in entries if e["outcome"] == PASSED}
        return launches.chosen(launched, {e["test"]: e.get("seconds", 0.0) for e in entries})

    # ---- what became of it ----

    def take(self, shard: Shard) -> None:
        """Tests of a running process that have ended; a sanitizer speaks until its own end."""
        if not shard.sanitized:
            self._record(shard)

    def _record(self, shard: Shard) -> None:
        for test, seen in shard.seen.items():
            names = seen.get("launches", [])
            self.kernels += [name for name in names if name not in self.kernels]
            places = {"launches": [self.kernels.index(name) for name in names]} if names else {}
            self._put(shard.group, shard.check, test, **(seen | places))

    def close(self, shard: Shard, code: int | None, why: str) -> list[Shard]:
        """Of a process that is over. Without a status it was ended for the reason `why`, or, if
        there is none, since the time is up. Tests that it owes are returned."""
        self.take(shard)
        if code is None and not why:
            return []
        if shard.end is None:
            return self._close_dead(shard, why or f"the process ended with {code}")
        self._close_ended(shard)
        if code not in (0, 1, 2, 9):  # 2: stopped in time; 9: a sanitizer has found something
            self._find(shard, shard.tests, "process", f"ended with {code}\n{shard.log_end()}")
        return []

    def _close_dead(self, shard: Shard, why: str) -> list[Shard]:
        """Amid a test, which has failed; the others are run by another process."""
        blamed = [shard.begun] if shard.begun else shard.rest
        if not blamed:  # behind its last test
            self._record(shard)
            self._find(shard, shard.tests, "process", f"{why}\n{shard.log_end()}")
            return []
        for test in blamed:
            text = f"{why}\n{shard.log_end()}"
            self._put(shard.group, shard.check, test, FAILED, text=text)
        owed = shard.tests if shard.sanitized else shard.rest
        owed = [test for test in owed if test not in blamed]
        return [shard.again(owed)] if owed else []

    def _close_ended(self, shard: Shard) -> None:
        assert shard.end is not None
        if not shard.end["stopped"]:
            for test in shard.rest:
                text = f"pytest has not run it\n{shard.log_end()}"
                self._put(shard.group, shard.check, test, FAILED, text=text)
        if not shard.sanitized:
            return
        report = read(shard.text, shard.tests)
        self._record(shard)
        for test, text in report.findings:
            self._find(shard, [test] if test else shard.tests, "finding", text)
        for test, count in Counter(report.unseen).items():
            text = f"{count} launches not checked"
            self._find(shard, [test] if test else shard.tests, "not checked", text)
        if not report.complete:
            text = f"{shard.check} printed no summary\n{shard.log_end()}"
            self._find(shard, shard.tests, "not checked", text)

    def _find(self, shard: Shard, tests: list[str], kind: str, text: str) -> None:
        found = {"group": shard.group, "check": shard.check, "kind": kind, "tests": tests}
        self.findings.append(found | {"text": text})

    # ---- what is told ----

    def verdict(self, keys: list[Key]) -> int:
        """The exit status: 0 only if in every check of every group tests passed, and none did
        not."""
        chosen = {key[:2] for key in keys}
        if self.pending(keys):
            return UNFINISHED
        found = any((f["group"], f["check"]) in chosen for f in self.findings)
        outcomes = {key: self.tests[key]["outcome"] for key in keys}
        passed = {key[:2] for key, outcome in outcomes.items() if outcome == PASSED}
        return int(found or FAILED in outcomes.values() or passed != chosen or not keys)

    def told(self, keys: list[Key]) -> Iterator[str]:
        """Counts of each check, and what was wrong."""
        for chosen in dict.fromkeys(key[:2] for key in keys):
            counts = Counter(self.tests[key]["outcome"] for key in keys if key[:2] == chosen)
            told = [f"{counts[name]} {name}" for name in (PASSED, FAILED, SKIPPED, NOT_RUN)]
            found = [f for f in self.findings if (f["group"], f["check"]) == chosen]
            told += [f"{n} {kind}" for kind, n in Counter(f["kind"] for f in found).items()]
            yield f"{chosen[0]}, {chosen[1]}: {', '.join(t for t in told if t[0] != '0')}"
            for key in keys:
                if key[:2] == chosen and self.tests[key]["outcome"] == FAILED:
                    yield f"  failed: {key[2]}"
            for one in found:
                where = one["tests"][0] if len(one["tests"]) == 1 else f"{len(one['tests'])} tests"
                yield f"  {one['kind']}: {where}: {one['text'].splitlines()[0]}"
