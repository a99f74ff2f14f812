"""A C++ runtime inside of the library, as some toolchains link it, is beside torch's, not mixed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nwor_specpv import Metrics

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "nwor_specpv"
CURRENT = ROOT / "build" / "current"


def link_command(target: str) -> str:
    """How the build links it, as a line for a shell in the build folder."""
    cache = (CURRENT / "CMakeCache.txt").read_text()
    if "CMAKE_GENERATOR:INTERNAL=Ninja" not in cache:
        name = target.removeprefix("lib").partition(".")[0]
        return (CURRENT / "CMakeFiles" / f"{name}.dir" / "link.txt").read_text()
    ninja = re.search(r"^CMAKE_MAKE_PROGRAM:\w+=(.+)$", cache, re.MULTILINE)[1]
    done = subprocess.run(
        [ninja, "-t", "commands", "-s", target],
        cwd=CURRENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def link_statically(target: str, folder: Path) -> None:
    command, found = re.subn(
        rf"-o {re.escape(target)} ",
        f"-static-libstdc++ -o {folder / target} ",
        link_command(target),
    )
    assert found == 1
    subprocess.run(command, shell=True, cwd=CURRENT, check=True)


PROGRAM = """
import torch, nwor_specpv

print(nwor_specpv.__file__)
wrong = [
    lambda: nwor_specpv.SlotAllocator(0, 1),
    lambda: nwor_specpv.tree_from_parents(torch.tensor([[-1, 5]]), torch.tensor([0])),
]
for call in wrong:  # of a binding, of an op
    try:
        call()
    except nwor_specpv.NworError as error:
        print("refused:", error)
print(nwor_specpv.Metrics().render())
"""


@pytest.mark.skipif(not Metrics().status()["built"], reason="built without prometheus-cpp")
def test_streams_and_errors_of_a_runtime_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "nwor_specpv"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (module,) = (path.name for path in PACKAGE.glob("_C*.so"))
    for target in ("libnwor_specpv.so", module):
        link_statically(target, folder)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(folder))
    assert done.stdout.count("\nrefused: ") == 2
    # The library's own streams, and those of prometheus-cpp.
    assert re.search(r"^process_resident_memory_bytes \d+", done.stdout, re.MULTILINE)
    assert "\nnwor_staged_tokens_total 0\n" in done.stdout
