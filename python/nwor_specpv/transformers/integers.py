"""Whole numbers as callers bring them: Python's, numpy's, or a tensor of one."""

from __future__ import annotations

import operator
from typing import Any

from nwor_specpv import NworError


def integer(value: Any) -> int | None:
    """None where it is none; nor is True, though Python counts with it."""
    value = plain(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def plain(value: Any) -> Any:
    """Arrays and tensors as lists, or as a number where they have no dimension."""
    return value.tolist() if hasattr(value, "tolist") else value


def at_least_one(name: str, value: Any) -> int:
    count = integer(value)
    if count is None or count < 1:
        raise NworError(f"{name}: got {value!r}, expected 1 or more")
    return count
