"""Which features ran on which vLLM, torch and Python, as tools/compatibility.py has recorded it of
CPUs and tools/gpu_tests.py of a GPU."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .records import RESULTS, ROOT, head, load, row

# In this order; a run may have none of a kind.
FEATURES = (
    "staging on V1",
    "staging on V2",
    "lossless without a head on V1",
    "lossless without a head on V2",
    "lossless with a head on V2",
    "drafts by measured speed on V2",
    "refresh on V1",
    "refresh on V2",
    "one switch on V1",
    "FlashAttention backend, on a double on V1",
)


def adapters() -> list[str]:
    """Versions that have an adapter, the oldest first."""
    folder = ROOT / "python" / "nwor_specpv" / "vllm" / "versions"
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.glob("v*.py")))
    return [match[1] for text in texts if (match := re.search(r'version: str = "([\d.]+)"', text))]


def gpu_runs() -> Iterator[dict[str, Any]]:
    """Of the tests of vLLM on a GPU, one for each file of results."""
    for path in sorted(RESULTS.glob("h200/gpu_tests*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        setting, features = data["setting"], {}
        for test in data["tests"]:
            for feature in data.get("serves", {}).get(test["test"], ()):
                features.setdefault(feature, Counter())[test["outcome"]] += 1
        if features:
            yield {
                "vllm": setting["vllm"],
                "device": setting["device"].removeprefix("NVIDIA "),
                "machine": "x86_64",
                "torch": setting["torch"].partition("+")[0],
                "python": setting["python"].rpartition(".")[0],
                "revision": setting["commit"][:12],
                "features": features,
            }


def compatibility_lines() -> Iterator[str]:
    runs = [*load("compatibility.json")["runs"], *gpu_runs()]
    runs.sort(key=lambda run: [*map(int, run["vllm"].split("."))])
    yield "Tests that passed, of those that stand for a feature; `-`: none was run."
    yield ""
    titles = [f"{run['vllm']}, {run['device']} ({run['machine']})" for run in runs]
    missing = [version for version in adapters() if version not in {r["vllm"] for r in runs}]
    yield from head("", *titles, *missing)
    yield row("torch", *(run["torch"] for run in runs), *["-"] * len(missing))
    yield row("Python", *(run["python"] for run in runs), *["-"] * len(missing))
    yield row("commit", *(f"`{run['revision']}`" for run in runs), *["-"] * len(missing))
    known = {name for run in runs for name in run["features"]}
    for feature in (*FEATURES, *sorted(known - set(FEATURES))):
        if feature in known:
            cells = (_cell(run["features"].get(feature)) for run in runs)
            yield row(_named(feature), *cells, *["not run"] * len(missing))


def _named(feature: str) -> str:
    name, _, runner = feature.rpartition(" on ")
    mode, _, rest = name.partition(" ")
    if mode in ("lossless", "refresh"):
        name = f"`{mode}` {rest}".strip()
    return f"{name}, model runner {runner}"


def _cell(counts: dict[str, Any] | None) -> str:
    if not counts or not counts.get("passed", 0) + counts.get("failed", 0):
        return "-"
    failed = counts.get("failed", 0)
    return str(counts.get("passed", 0)) + (f", **{failed} failed**" if failed else "")
