"""Where a C++ build finds the headers, the library and the CMake package of this installation."""

from __future__ import annotations

from pathlib import Path

from . import _stamp

_PACKAGE_DIR = Path(__file__).absolute().parent


def get_include() -> str:
    """The folder to put on the include path: `#include "kv_interceptor/interceptor.h"`."""
    installed = _PACKAGE_DIR / "include"
    checkout = _PACKAGE_DIR.parent.parent / "csrc"
    if not installed.is_dir() and _stamp.is_source_checkout(_PACKAGE_DIR):
        return str(checkout)
    return str(installed)


def get_cmake_dir() -> str:
    """The folder for `-Dnwor_specpv_DIR=`, holding the target nwor_specpv::nwor_specpv."""
    return str(_PACKAGE_DIR / "cmake")
