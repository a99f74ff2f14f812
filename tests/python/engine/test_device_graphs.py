"""DeviceGraphs on a GPU: its GoogleTests, most of which ctest skips without one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

BUILT = Path(__file__).resolve().parents[3] / "build" / "current"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_of_a_device() -> None:
    programs = [path for path in BUILT.rglob("base_test") if path.is_file()]
    if not programs:
        pytest.skip("the GoogleTests are not built: NWOR_BUILD_TESTS=ON")
    command = [str(programs[0]), "--gtest_filter=DeviceGraphs.*"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[  PASSED  ] 3 tests." in done.stdout
    assert "SKIPPED" not in done.stdout
