"""Finds a second copy of the package: one on the path, or one whose library is loaded already.

Two installed copies answer for each other: the plugin's entry point and the command may belong to
one and the library to another. Two loaded libraries register the same torch ops, which ends the
process. This module needs only Python itself.
"""

from __future__ import annotations

import site
import sys
from collections.abc import Iterable
from pathlib import Path

LIBRARY = "libnwor_specpv.so"
PACKAGE = "nwor_specpv"


def find_problem(package_dir: Path) -> str | None:
    """One sentence about another copy, with the command that removes it; None if there is none."""
    loaded = loaded_elsewhere(package_dir)
    if loaded is not None:
        return (
            f"nwor_specpv in {package_dir} cannot be loaded: this process has loaded another copy, "
            f"{loaded}; use one of the two, or run `pip uninstall -y nwor-specpv` for the other."
        )
    if package_dir.parent.resolve() not in _site_folders():
        return None  # a checkout or a folder that somebody put on the path: that choice counts
    others = copies_on(sys.path, package_dir)
    if not others:
        return None
    return (
        f"two copies of nwor_specpv are installed: {package_dir} and {others[0]}; run "
        "`pip uninstall -y nwor-specpv` until pip finds none, remove what is left of them, and "
        "install it again."
    )


def copies_on(path: Iterable[str], package_dir: Path) -> list[Path]:
    """Built copies of the package in folders of `path`, without the one in `package_dir`."""
    found: list[Path] = []
    ours = package_dir.parent.resolve() / PACKAGE
    for entry in path:
        folder = Path(entry or ".").resolve() / PACKAGE
        if folder != ours and folder not in found and (folder / LIBRARY).is_file():
            found.append(folder)
    return found


def loaded_elsewhere(package_dir: Path, maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The library of another copy in this process; None where nobody can tell."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    names = (line.split(maxsplit=5)[-1] for line in lines if line.endswith(f"/{LIBRARY}"))
    ours = (package_dir / LIBRARY).resolve()
    return next((Path(name) for name in names if Path(name) != ours), None)


def _site_folders() -> set[Path]:
    """Where pip installs packages, for this interpreter and this user."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return {Path(folder).resolve() for folder in folders}
