"""A profiler sees our ranges around real work, in a domain of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nwor_specpv import _stamp

ROOT = Path(__file__).resolve().parents[3]
RECORDER = ROOT / "tests" / "cpp" / "profiling" / "injection" / "nvtx_recorder.cpp"
SCRIPT = "from metrics.rounds import play; play(1, seed=0)"


def build_recorder(folder: Path) -> Path:
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    home = os.environ.get("CUDA_HOME") or (nvcc and str(Path(nvcc).resolve().parents[1]))
    if not _stamp.read_stamp().cuda or not home:
        pytest.skip("built without the CUDA toolkit: no NVTX")
    library = folder / "librecorder.so"
    flags = ["-std=c++17", "-shared", "-fPIC", f"-I{home}/include"]
    command = ["c++", *flags, str(RECORDER), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    return library


def test_a_round_opens_stage_and_commit_ranges(tmp_path: Path) -> None:
    log = tmp_path / "events"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "python"), *filter(None, sys.path)]),
        "NVTX_INJECTION64_PATH": str(build_recorder(tmp_path)),
        "NWOR_NVTX_LOG": str(log),
    }
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, timeout=240)
    events = [line for line in log.read_text().splitlines() if "nwor" in line]
    stage = ["push nwor_specpv nwor.stage", "pop nwor_specpv"]
    commit = ["push nwor_specpv nwor.commit", "pop nwor_specpv"]
    assert events == ["domain nwor_specpv", *stage, *stage, *commit]
