"""vLLM's entry point where something does not fit: one line, and nothing native is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nwor_specpv
from nwor_specpv import _stamp
from nwor_specpv.vllm import versions

PACKAGE = Path(nwor_specpv.__file__).resolve().parent

CALL = """
import sys, nwor_specpv_vllm
nwor_specpv_vllm.register()
files = [line.split()[-1] for line in open("/proc/self/maps") if ".so" in line]
print("loaded", sum("nwor_specpv" in "/".join(name.split("/")[-2:]) for name in files))
"""


def make_site(folder: Path, vllm: str, **stamp: str) -> Path:
    """This package with another stamp, and a vLLM that has nothing but its version."""
    skipped = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.bin")
    shutil.copytree(PACKAGE, folder / "nwor_specpv", ignore=skipped)
    shutil.copy(PACKAGE.parent / "nwor_specpv_vllm.py", folder)
    path = folder / "nwor_specpv" / _stamp.STAMP
    path.write_text(json.dumps(json.loads(path.read_text()) | stamp))
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "version.py").write_text(f"__version__ = {vllm!r}\n")
    return folder


def call(site: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CALL],
        env=os.environ | {"PYTHONPATH": str(site)} | env,
        cwd=site,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("version", [pytest.param("0.11.2", marks=pytest.mark.slow), "0.99.0"])
def test_another_vllm_is_one_line_with_the_command(tmp_path: Path, version: str) -> None:
    site = make_site(tmp_path, version, torch="2.13.0+cu130")
    done = call(site)
    assert done.stderr == (
        f"nwor_specpv is off: vLLM {version} is not supported; run `pip install vllm==0.32.0` "
        f"(vLLM {versions.supported()} works, each with its torch)\n"
    )
    assert done.stdout == "loaded 0\n"
    strict = call(site, NWOR_SPECPV_STRICT="1")
    assert strict.returncode == 1
    assert f"NworError: nwor_specpv: vLLM {version} is not supported; run" in strict.stderr


def test_a_library_for_another_torch_is_one_line_with_the_command(tmp_path: Path) -> None:
    """torch belongs to vLLM: the library is the one to change."""
    done = call(make_site(tmp_path, versions.ADAPTERS[-1].version, torch="1.2.3+cu999"))
    (line,) = done.stderr.splitlines()
    assert line.startswith("nwor_specpv is off: nwor_specpv ")
    assert "was built for torch 1.2.3+cu999, but torch " in line
    assert "run `pip install --no-build-isolation" in line
    assert "pip install torch" not in line
    assert done.stdout == "loaded 0\n"


def test_a_linked_checkout_is_built_by_make(tmp_path: Path) -> None:
    site = make_site(tmp_path, versions.ADAPTERS[-1].version, torch="1.2.3+cu999")
    for path in (site / "nwor_specpv").glob("*.py"):
        path.unlink()
        path.symlink_to(PACKAGE / path.name)
    assert "run `make setup-vllm` in the checkout" in call(site).stderr


def test_every_adapter_has_its_torch() -> None:
    known = [adapter.version for adapter in versions.ADAPTERS]
    assert [*_stamp.VLLM_OF_TORCH.values()] == known
    assert _stamp.install_vllm("2.11.0+cu130") == "pip install vllm==0.26.0"
    assert _stamp.install_vllm("2.13.1") == "pip install vllm==0.32.0"
    assert _stamp.install_vllm("") == f"pip install vllm=={known[-1]}"
