"""tools/vllm_drift.py on the environments of vLLM that are installed here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    found.parents[3].name.rpartition("-")[2]: found.parent
    for found in sorted(ROOT.glob(".venv-vllm-*/lib/python*/site-packages/vllm"))
}


def drift(*arguments: object) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / "tools" / "vllm_drift.py"), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return found.returncode, (found.stdout + found.stderr).splitlines()


@pytest.mark.skipif(not PACKAGES, reason="no vLLM is installed: make setup-vllm")
def test_installed_versions_are_as_their_adapters_have_them() -> None:
    for version, site in PACKAGES.items():
        code, (line,) = drift(site)
        assert code == 0
        assert line.startswith(f"vLLM {version}")
        assert f"differ from those of {version}; adapters that fit: {version}" in line
        assert ": 0 of " in line


@pytest.mark.skipif(not PACKAGES, reason="no vLLM is installed: make setup-vllm")
def test_what_differs_from_another_version_is_named_with_file_and_line() -> None:
    version, site = next(iter(PACKAGES.items()))
    other, change = ("0.32.0", "without") if version == "0.26.0" else ("0.26.0", "new")
    code, lines = drift("--adapter", other, site)
    assert code == 0  # its own adapter fits
    (line,) = (line for line in lines if "GPUModelRunner.prepare_inputs has changed" in line)
    place, number, _ = line.split(":", 2)
    assert place == "vllm/v1/worker/gpu/model_runner.py"
    assert "def prepare_inputs(" in (site / place).read_text().splitlines()[int(number) - 1]
    assert line.endswith(f"{change} batch_req_state, num_active_loras")


@pytest.mark.skipif(not PACKAGES, reason="no vLLM is installed: make setup-vllm")
def test_a_release_that_fits_no_adapter(tmp_path: Path) -> None:
    site = next(iter(PACKAGES.values()))
    for path in site.glob("vllm/**/*.py"):
        target = tmp_path / path.relative_to(site)
        if {"models", "entrypoints", "kernels", "third_party"}.isdisjoint(target.parts):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    runner = tmp_path / "vllm/v1/worker/gpu/model_runner.py"
    runner.write_text(runner.read_text().replace("def add_requests(self", "def let_in(self"))
    code, lines = drift(tmp_path)
    assert code == 1
    said = "vllm/v1/worker/gpu/model_runner.py:0: GPUModelRunner.add_requests is not there"
    assert any(line.startswith(said) for line in lines)
    assert lines[-1].endswith("adapters that fit: none")


def test_what_is_no_release_is_refused(tmp_path: Path) -> None:
    code, lines = drift(tmp_path)
    assert code == 2
    assert lines[-1].endswith(f"{tmp_path} holds no package vllm")
