"""Puts functions of ours around vLLM's, once each, after a check of their signatures."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from nwor_specpv.vllm.versions import VllmFunction, signature_problem

MARK = "_nwor_specpv_wrapped"


def wrap(method: VllmFunction, own: Callable[..., None], *, after: bool = False) -> str | None:
    """Has `own` called with what the method gets, before it or `after` it. As `replace`."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not after:
                own(self, *args, **kwargs)
            found = original(self, *args, **kwargs)
            if after:
                own(self, *args, **kwargs)
            return found

        return wrapper

    return replace(method, around)


def replace(function: VllmFunction, make: Callable[[Callable[..., Any]], Any]) -> str | None:
    """Puts what `make` returns for it in the function's place, once; the problem, if it is not as
    expected, and then nothing is replaced."""
    *owners, name = function.path.split(".")
    try:
        module = importlib.import_module(function.module)
        holder: Any = functools.reduce(getattr, owners, module)
        original = getattr(holder, name)
    except (ImportError, AttributeError) as error:
        return f"this vLLM has no {function} ({error})"
    if getattr(original, MARK, False):
        return None
    problem = signature_problem(original, function.parameters)
    if problem is not None:
        return problem
    made = functools.wraps(original)(make(original))
    setattr(made, MARK, True)
    is_static = isinstance(vars(holder).get(name), staticmethod)
    setattr(holder, name, staticmethod(made) if is_static else made)
    return None
