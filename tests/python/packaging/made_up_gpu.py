"""tools/gpu_tests.py in a folder of its own, where a GPU and compute-sanitizer seem to be."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "gpu_tests.py"

TESTS = """
import os, time
import pytest

CACHED = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") is None
TOOL = os.environ.get("SANITIZED", "plain")

@pytest.mark.parametrize("n", range(6))
def test_cuda(n):
    assert CACHED is (TOOL != "memcheck")

def test_cuda_graph():
    assert CACHED

def test_of_the_cpu():
    raise AssertionError

def test_cuda_absent():
    pytest.skip("not here")

@pytest.mark.skipif(False, reason="no CUDA device")
def test_of_a_device():
    pass
"""
SANITIZER = """#!/bin/sh
export SANITIZED=$2
while [ "$1" != 9 ]; do shift; done
shift
"$@"
code=$?
{summary}
exit $code
"""
CLEAN = """
case $SANITIZED in
  racecheck) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
  *) echo "========= ERROR SUMMARY: 0 errors";;
esac
"""
# The profiler sees what tests append to `launched`.
TORCH = {
    "torch/__init__.py": "launched = []\n",
    "torch/profiler.py": """
from types import SimpleNamespace
import torch

class ProfilerActivity:
    CUDA = 0

class profile:
    def __init__(self, activities):
        assert activities == [ProfilerActivity.CUDA]

    def __enter__(self):
        torch.launched.clear()

    def __exit__(self, *_):
        events = [SimpleNamespace(name=lambda name=name: name) for name in torch.launched]
        found = SimpleNamespace(events=lambda: events)
        self.profiler = SimpleNamespace(kineto_results=found)
""",
}
# The reports of a GPU whose memory is free; `free` says otherwise.
NVIDIA_SMI = """#!/bin/sh
case "$1" in
  *driver_version) echo 580.1;;
  *) cat free 2>/dev/null || echo 140000;;
esac
"""
FOUND = {
    "device": "Made-up GPU",
    "torch": "2.11.0+cu130",
    "vllm": "0.26.0",
    "python": "3.12.3",
    "library": {"torch": "2.11.0", "cuda": "13.0", "for": "90a"},
    "revision": "abcdef",
    "plugin": True,
}
PATHS = {"kernels": "test_some.py", "host": "test_host.py", "vllm": "vllm"}


class Tool:
    """The tool in a folder of its own, where each group has tests of its own."""

    def __init__(self, module: ModuleType, root: Path) -> None:
        self.module, self.root = module, root
        self.file = root / "results.json"

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def sanitizer(self, summary: str = CLEAN) -> None:
        self.write("bin/compute-sanitizer", SANITIZER.format(summary=summary))
        (self.root / "bin" / "compute-sanitizer").chmod(0o755)

    def call(self, *groups: str, jobs: int = 1, all_tests: bool = True, **options: Any) -> int:
        """The exit status of a call; keywords are its options."""
        arguments = ["--groups", *groups, "--jobs", str(jobs), "--json", str(self.file)]
        arguments += ["--all-tests"] * all_tests
        arguments += ["--logs", str(self.root / "logs")]
        for name, value in options.items():
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
        return self.module.main([*arguments])

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())

    def outcomes(self, check: str = "plain") -> dict[str, str]:
        """By the name of the test."""
        tests = [entry for entry in self.data["tests"] if entry["check"] == check]
        return {entry["test"].partition("::")[2]: entry["outcome"] for entry in tests}

    def entry(self, name: str) -> dict[str, Any]:
        (entry,) = [entry for entry in self.data["tests"] if entry["test"].endswith(name)]
        return entry


def load_tool(name: str) -> ModuleType:
    """tools/gpu_tests.py as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def made_up_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tool]:
    """The tool where a GPU, vLLM and the sanitizer seem to be."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    module = load_tool("nwor_gpu_tests")
    module.ROOT = tmp_path
    groups = {
        name: module.Group((path,), of_kernels=name == "kernels") for name, path in PATHS.items()
    }
    monkeypatch.setattr(module, "GROUPS", groups)
    monkeypatch.setattr(module, "probe", lambda _: dict(FOUND))
    found = Tool(module, tmp_path)
    found.write("bin/nvidia-smi", NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    found.sanitizer()
    found.write("test_some.py", TESTS)
    for name, text in TORCH.items():
        found.write(name, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # processes start sooner
    yield found
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("gpu", "run_tests", "nwor_gpu_tests"):
            del sys.modules[name]
