#!/usr/bin/env python3
"""What `make test-torch` does: builds and tests the library with other releases of torch.

    tools/test_torch.py                  with each release in TORCH
    tools/test_torch.py 2.13.0 2.14.0    with these

Each has an environment, .venv-torch-<release>, and a CMake folder. The package is installed there
as from a wheel; the checkout keeps the library of .venv. GoogleTest and pytest then run as in
`make test`, without the tests of the checkout itself (tests/python/packaging). NWOR_CUDA=OFF
compiles no kernels; otherwise an nvcc compiles them, for TORCH_CUDA_ARCH_LIST or 9.0a.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from run_tests import ROOT, Outcome, cores, prepare_environment, run, seed_of, workers

TORCH = ("2.13.0", "2.14.0")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def install(torch: str, python: Path) -> bool:
    """Builds the library and the GoogleTest suite, and installs the package."""
    folder = ROOT / "build" / f"wheel-torch-{torch}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    environment = {"NWOR_BUILD_TESTS": "ON", "NWOR_WERROR": "ON", "TORCH_CUDA_ARCH_LIST": "9.0a"}
    build = [str(python), "-c", BUILD, str(folder)]
    if subprocess.call(build, cwd=ROOT, env=environment | dict(os.environ)) != 0:
        return False
    (wheel,) = folder.glob("*.whl")
    command = [str(python.parent / "uv"), "pip", "install", "-q", "--python", str(python)]
    return subprocess.call([*command, "--no-deps", "--reinstall", str(wheel)]) == 0


def test(torch: str) -> list[Outcome]:
    """Everything that runs with this torch; the build counts as one of the tests."""
    start = time.monotonic()
    python = ROOT / f".venv-torch-{torch}" / "bin" / "python"
    ready = subprocess.call([str(ROOT / "tools" / "setup_environment.sh"), torch], cwd=ROOT) == 0
    built = Outcome(
        f"torch {torch} build", ready and install(torch, python), time.monotonic() - start
    )
    if not built.ok:
        return [built]
    folder = ROOT / "build" / f"torch-{torch}"
    os.environ["NWOR_BUILD_DIR"] = str(folder)
    ctest = [str(python.parent / "ctest"), "--test-dir", str(folder), "--output-on-failure"]
    ctest += ["--no-tests=error", "--progress", "--parallel", str(cores())]
    results = folder / "pytest"
    pytest = [str(python), "-m", "pytest", "-q", f"--junitxml={results / 'all.xml'}"]
    pytest += ["--numprocesses", str(workers()), "--dist", "loadfile", "-m", "not slow"]
    pytest += ["--ignore=tests/python/packaging"]
    return [
        built,
        run(f"torch {torch} GoogleTest", ctest, folder / "gtest"),
        run(f"torch {torch} pytest", pytest, results),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("torch", nargs="*", help=f"releases (default: {' '.join(TORCH)})")
    releases = parser.parse_args().torch or TORCH
    wrong = [release for release in releases if not re.fullmatch(r"\d+\.\d+\.\d+", release)]
    if wrong:
        parser.error(f"torch: got {wrong[0]!r}, expected a version like {TORCH[0]}")
    os.environ.setdefault("NWOR_TEST_SEED", str(seed_of(ROOT)))
    prepare_environment()
    outcomes = [outcome for release in releases for outcome in test(release)]
    passed = all(outcome.ok for outcome in outcomes)
    print(f"\n{'PASSED' if passed else 'FAILED'}: {'; '.join(map(str, outcomes))}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
