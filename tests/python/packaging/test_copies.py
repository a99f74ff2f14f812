"""A second copy of the package is named in one sentence before a library is loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nwor_specpv
from nwor_specpv import _copies

PACKAGE = Path(nwor_specpv.__file__).resolve().parent
COMMAND = "`pip uninstall -y nwor-specpv`"


def copy_package(site: Path) -> Path:
    folder = site / "nwor_specpv"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    return folder


def run_python(code: str, *path: Path, **env: str) -> str:
    """What the program prints, and that its process ended well: two libraries would abort it."""
    insert = "\n".join(f"sys.path.insert({i}, {str(p)!r})" for i, p in enumerate(path))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{insert}\n{code}"],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT = """
try:
    import nwor_specpv
    print("imported", nwor_specpv.__file__)
except ImportError as error:
    print(error)
    print("loaded", sum("nwor_specpv" in line.split("/")[-1] for line in open("/proc/self/maps")))
"""


def test_a_library_that_is_loaded_already_is_named(tmp_path: Path) -> None:
    other = copy_package(tmp_path / "other")
    load = f"import torch; torch.ops.load_library({str(other / _copies.LIBRARY)!r})\n"
    sentence, *_ = run_python(load + IMPORT, PACKAGE.parent).splitlines()
    assert f"this process has loaded another copy, {other / _copies.LIBRARY};" in sentence
    assert COMMAND in sentence


def test_the_same_library_is_no_other_copy() -> None:
    load = f"import torch; torch.ops.load_library({str(PACKAGE / _copies.LIBRARY)!r})\n"
    assert run_python(load + IMPORT, PACKAGE.parent).startswith("imported")


def test_two_installed_copies_are_named(tmp_path: Path) -> None:
    used, other = copy_package(tmp_path / "site"), copy_package(tmp_path / "user")
    # The first folder is this interpreter's own, as far as the package can tell.
    site = f"import site; site.getsitepackages = lambda: [{str(used.parent)!r}]\n"
    sentence, loaded = run_python(site + IMPORT, used.parent, other.parent).splitlines()
    assert sentence.startswith(f"two copies of nwor_specpv are installed: {used} and {other};")
    assert COMMAND in sentence
    assert loaded == "loaded 0"
    shutil.rmtree(other)
    # The environment of the tests has a copy, too, most often a checkout.
    one = "sys.path[1:] = [p for p in sys.path[1:] if not os.path.isdir(p + '/nwor_specpv')]"
    assert run_python(f"import os; {one}\n{site}{IMPORT}", used.parent).startswith(
        f"imported {used}"
    )


def test_a_folder_put_on_the_path_may_hide_an_installed_copy(tmp_path: Path) -> None:
    chosen, installed = copy_package(tmp_path / "mine"), copy_package(tmp_path / "site")
    site = f"import site; site.getsitepackages = lambda: [{str(installed.parent)!r}]\n"
    said = run_python(site + IMPORT, chosen.parent, installed.parent)
    assert said.startswith(f"imported {chosen}")


@pytest.mark.parametrize("text", ["", "7f00-7f01 r-xp 0 00:00 0\n", "7f r-xp 0 00:00 1 /a/b.so\n"])
def test_maps_without_the_library(tmp_path: Path, text: str) -> None:
    maps = tmp_path / "maps"
    assert _copies.loaded_elsewhere(PACKAGE, maps) is None  # no such file
    maps.write_text(text)
    assert _copies.loaded_elsewhere(PACKAGE, maps) is None


def test_a_path_with_spaces_in_maps(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 fe:00 12      /some where/{_copies.LIBRARY}\n")
    found = _copies.loaded_elsewhere(PACKAGE, maps)
    assert found == Path("/some where") / _copies.LIBRARY
