"""A profiler sees our ranges around real work, in a domain of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
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


def record(tmp_path: Path, **more: str) -> list[str]:
    """What a profiler saw of us in one round."""
    log = tmp_path / "events"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "python"), *filter(None, sys.path)]),
        "NVTX_INJECTION64_PATH": str(build_recorder(tmp_path)),
        "NWOR_NVTX_LOG": str(log),
        **more,
    }
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, timeout=240)
    return [line for line in log.read_text().splitlines() if "nwor" in line]


STAGE = ["push nwor_specpv nwor.stage", "pop nwor_specpv"]
COMMIT = ["push nwor_specpv nwor.commit", "pop nwor_specpv"]
ROUND = ["domain nwor_specpv", *STAGE, *STAGE, *COMMIT]


def test_a_round_opens_stage_and_commit_ranges(tmp_path: Path) -> None:
    assert record(tmp_path) == ROUND


def test_events_have_the_time_of_day(tmp_path: Path) -> None:
    """benchmarks/vllm/timeline.py lays them beside what torch's profiler saw."""
    before = time.time_ns()
    lines = [line.rpartition(" ") for line in record(tmp_path, NWOR_NVTX_CLOCK="1")]
    assert [line for line, _, _ in lines] == ROUND
    moments = [before, *(int(ns) for _, _, ns in lines), time.time_ns()]
    assert moments == sorted(moments)
