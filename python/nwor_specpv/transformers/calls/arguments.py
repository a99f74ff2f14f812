"""Converts whole numbers that callers pass: Python's, numpy's, or a tensor of one."""

from __future__ import annotations

import operator
from typing import Any

from nwor_specpv import NworError


def as_integer(value: Any) -> int | None:
    """Returns the number, or None where the value is not a whole number; True is not one."""
    value = as_python(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_python(value: Any) -> Any:
    """Turns arrays and tensors into lists, or into a number where they have no dimension."""
    return value.tolist() if hasattr(value, "tolist") else value


def at_least_one(name: str, value: Any) -> int:
    """Returns the value of the argument `name`; raises unless it is 1 or more."""
    count = as_integer(value)
    if count is None or count < 1:
        raise NworError(f"{name}: got {value!r}, expected 1 or more")
    return count
