"""Checks that the packages which read model files are installed."""

from __future__ import annotations

import importlib.util

from nwor_specpv.errors import NworError


def require_package(name: str, requirement: str, use: str) -> None:
    """Raises an error with the command that installs it: `requirement` is what pip takes."""
    if importlib.util.find_spec(name) is None:
        raise NworError(f"{use} needs the package {name}: run `pip install '{requirement}'`")
