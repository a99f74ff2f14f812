"""The session store's tests under the thread sanitizer, built here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("NWOR_BUILD_DIR") or ROOT / "build" / "current")
TARGET = "session_thread_sanitizer_test"


@pytest.mark.slow
def test_many_threads_race_for_nothing() -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    jobs = str(len(os.sched_getaffinity(0)))
    build = [cmake, "--build", str(BUILD), "--target", TARGET, "--parallel", jobs]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    test = [str(BUILD / "tests" / "cpp" / TARGET)]
    if setarch := shutil.which("setarch"):
        test = [setarch, "-R", *test]  # the sanitizer wants its addresses where it expects them
    known = ROOT / "tests" / "cpp" / "session" / "thread_sanitizer.supp"
    options = {"TSAN_OPTIONS": f"exitcode=66 suppressions={known}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(test, capture_output=True, text=True, env=os.environ | options)
    assert "WARNING: ThreadSanitizer" not in run.stderr, run.stderr[:8000]
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "[  PASSED  ]" in run.stdout
