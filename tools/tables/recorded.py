"""What is recorded, as benchmarks/results/recorded.toml says, and the tables of its README."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from .records import RESULTS, head, load, row

GPU_TESTS = "h200/gpu_tests.json"


@dataclass(frozen=True)
class Result:
    """An entry of the file."""

    file: str
    commands: tuple[str, ...] = ()
    made_by: str = ""
    note: str = ""
    commit: str = ""
    peers: str = ""
    measures: tuple[str, ...] = ()  # folders

    @property
    def name(self) -> str:
        return Path(self.file).stem

    @property
    def path(self) -> Path:
        return RESULTS / self.file

    @property
    def revision(self) -> str:
        """The commit, as the entry or the file has it; empty where neither does."""
        if self.commit or self.path.suffix != ".json":
            return self.commit
        data = json.loads(self.path.read_text(encoding="utf-8"))
        places = (data, data.get("environment", {}), data.get("setting", {}))
        found = (place.get(name) for place in places for name in ("revision", "commit"))
        return next((str(one)[:7] for one in found if one), "")

    @property
    def told(self) -> str:
        """How it was made, in Markdown."""
        if self.made_by:
            return self.made_by
        commands = ", then ".join(f"`{command}`" for command in self.commands)
        return f"{commands}; {self.note}" if self.note else commands


def read_results(text: str | None = None) -> list[Result]:
    """All entries, also of files that are yet to be made."""
    data = tomllib.loads(text or (RESULTS / "recorded.toml").read_text(encoding="utf-8"))
    found = []
    for entry in data["result"]:
        folders = [path for name in entry.pop("measures", ()) for path in data["sources"][name]]
        commands = tuple(entry.pop("commands", ()))
        found.append(Result(**entry, commands=commands, measures=tuple(folders)))
    return found


def _file_lines(folder: str) -> Iterator[str]:
    yield from head(f"`{folder}/`", "made by", "commit", "peers")
    for result in read_results():
        if result.file.startswith(f"{folder}/") and result.path.exists():
            commit = result.revision
            told = f"`{commit}`" if commit and commit.isalnum() and commit != "there" else commit
            yield row(f"`{result.path.name}`", result.told, told, result.peers)


def h200_lines() -> Iterator[str]:
    yield from _file_lines("h200")


def cpu_lines() -> Iterator[str]:
    yield from _file_lines("cpu")


def gpu_test_lines() -> Iterator[str]:
    """The recorded run of `make test-gpu`."""
    if not (RESULTS / GPU_TESTS).exists():
        yield "No run of `make test-gpu` is recorded."
        return
    yield from run_lines(load(GPU_TESTS))


def run_lines(data: dict[str, Any]) -> Iterator[str]:
    setting, tests, findings = data["setting"], data["tests"], data["findings"]
    dirty = ", with changes that are not committed" if setting["dirty"] else ""
    yield (
        f"`make test-gpu` at `{setting['commit'][:7]}`{dirty}: {setting['device']}, driver "
        f"{setting['driver']}, Python {setting['python']}, torch {setting['torch']}, vLLM "
        f"{setting['vllm']}, a library for {setting['library']['for']}."
    )
    yield ""
    outcomes = ("passed", "failed", "skipped", "not run")
    yield from head("group", "check", *outcomes, "found", "seconds in tests")
    for group, check in dict.fromkeys((test["group"], test["check"]) for test in tests):
        of_check = [t for t in tests if (t["group"], t["check"]) == (group, check)]
        counts = Counter(test["outcome"] for test in of_check)
        kinds = Counter(f["kind"] for f in findings if (f["group"], f["check"]) == (group, check))
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        seconds = sum(test.get("seconds", 0) for test in of_check)
        told = (counts[outcome] for outcome in outcomes)
        yield row(group, check, *told, found or "nothing", f"{seconds:.0f}")
    reasons = Counter(test.get("text", "") for test in tests if test["outcome"] == "skipped")
    if reasons:
        yield ""
        told = (f"{reason.removeprefix('Skipped: ')} ({n})" for reason, n in reasons.most_common())
        yield f"Skipped: {'; '.join(told)}."
