"""Which speculator model runner V2 builds: ours in mode `lossless`, vLLM's own otherwise.

One name is replaced, `init_speculator`, after its parameters were compared with those that were
read. It goes when vLLM lets speculators be named by their class.
"""

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

from nwor_specpv.vllm import versions
from nwor_specpv.vllm.settings import read_settings

_PACKAGE = "vllm.v1.worker.gpu.spec_decode"
_RUNNER = "vllm.v1.worker.gpu.model_runner"  # has the name, too, once it is imported
_NAME = "init_speculator"
_MARK = "_nwor_specpv_replaced"

# Builds our speculator from a VllmConfig and a device.
Factory = Callable[[Any, Any], Any]

problem: str | None = f"{_PACKAGE}.{_NAME} has not been replaced"


def prepare(make_ours: Factory) -> None:
    """Has the name replaced when vLLM imports its package: that takes seconds, and only workers do.

    `make_ours` is called where our speculator is wanted. Calling it again changes nothing.
    """
    if _PACKAGE in sys.modules:
        install(make_ours)
    elif not any(isinstance(finder, _Awaiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting(make_ours))


class _Awaiting(MetaPathFinder):
    """Sees the package being imported, once, and lets the others do it."""

    def __init__(self, make_ours: Factory) -> None:
        self._make_ours = make_ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            install(self._make_ours)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(make_ours: Factory) -> None:
    """Replaces the name wherever it is; what keeps us from it is left in `problem`."""
    global problem
    try:
        package = sys.modules.get(_PACKAGE) or importlib.import_module(_PACKAGE)
        original = getattr(package, _NAME)
    except (ImportError, AttributeError) as error:
        problem = f"{_PACKAGE}.{_NAME} is not there: {error}"
        return
    if not getattr(original, _MARK, False):
        problem = versions.signature_problem(original, ("vllm_config", "device"))
        if problem is not None:
            return
        setattr(package, _NAME, _choosing(original, make_ours))
    runner = sys.modules.get(_RUNNER)
    if runner is not None:
        setattr(runner, _NAME, getattr(package, _NAME))
    problem = None


def wanted(vllm_config: Any) -> bool:
    """Whether this engine drafts by rounds: mode `lossless` with an EAGLE head."""
    settings = read_settings(vllm_config.additional_config)
    speculative = vllm_config.speculative_config
    return (
        settings.enable_specpv
        and settings.enable_nwor
        and settings.specpv_mode == "lossless"
        and speculative is not None
        and speculative.method in ("eagle", "eagle3")
    )


def _choosing(original: Factory, make_ours: Factory) -> Factory:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any) -> Any:
        make = make_ours if wanted(vllm_config) else original
        return make(vllm_config, device)

    setattr(init_speculator, _MARK, True)
    return init_speculator
