"""Puts functions of ours around vLLM's, once each, after a check of their signatures."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
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


def when_imported(module: str, act: Callable[[], Any]) -> None:
    """Calls `act` once vLLM has imported its module, which may take seconds and need not happen in
    every process. Calling it again before that changes nothing."""
    if module in sys.modules:
        act()
    elif not any(isinstance(f, _Awaiting) and f.module == module for f in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting(module, act))


class _Awaiting(MetaPathFinder):
    """Sees a module being imported, once, and lets the others do it."""

    def __init__(self, module: str, act: Callable[[], Any]) -> None:
        self.module = module
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._act()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
