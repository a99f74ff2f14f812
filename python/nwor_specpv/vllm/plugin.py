"""What vLLM's entry point (`nwor_specpv_vllm`) does. Doing it again changes nothing.

This vLLM and this torch are checked before anything native is loaded. Then our backends are named,
and `enable_specpv` fills in what users leave open (`hooks.arguments`). What can be refused is
judged when an engine is built, where its configuration is known. On CUDA users choose us
(`--attention-backend CUSTOM`); the CPU platform has one backend whatever is asked, so there ours
stands in its place.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nwor_specpv import _stamp
from nwor_specpv.errors import NworError, logger

from . import versions
from .settings import read_settings

CUDA_BACKEND = "nwor_specpv.vllm.backend.cuda.NworFlashBackend"
CPU_BACKEND = "nwor_specpv.vllm.backend.cpu.NworCpuBackend"


def register() -> None:
    """Registers the backends with this process' vLLM."""
    import vllm
    from vllm.version import __version__ as version

    _log_as_vllm_does()
    problem, warning = versions.choose(version, Path(vllm.__file__).absolute().parents[1])
    if problem is None:
        problem = _load_problem()
    if problem is not None:
        if read_settings(None).strict:
            raise NworError(f"nwor_specpv: {problem}")
        logger.warning("nwor_specpv is off: %s", problem)
        return
    _install(warning)


def _load_problem() -> str | None:
    """Why the library does not load, with the command that helps."""
    try:
        _stamp.load_native()
    except ImportError as error:
        return str(error)
    return None


def _install(warning: str | None) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .hooks import arguments, recovery, runner_choice, speculators

    if warning is not None:
        logger.warning("nwor_specpv: %s", warning)
    speculators.prepare(_make_speculator)
    recovery.prepare()
    problem = runner_choice.install()
    if problem is not None:  # vLLM takes its runner V1, which the rules of mode `lossless` refuse
        logger.warning("nwor_specpv: %s", problem)
    problem = arguments.install()
    if problem is not None:
        logger.warning("nwor_specpv: enable_specpv sets nothing that was left open: %s", problem)
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)


def _make_speculator(vllm_config: Any, device: Any) -> Any:
    """Our speculator, whose module imports much of vLLM."""
    from .hooks import speculators

    if speculators.drafts_without_head(vllm_config):
        from .specpv.self_speculator import SelfSpeculator

        return SelfSpeculator(vllm_config, device)
    if speculators.drafts_trees(vllm_config):
        from .tree.speculator import TreeSpeculator

        return TreeSpeculator(vllm_config, device)
    from .specpv.speculator import PartialViewSpeculator

    return PartialViewSpeculator(vllm_config, device)


def _log_as_vllm_does() -> None:
    """Our lines go where vLLM's go, unless somebody has said where ours go."""
    theirs = logging.getLogger("vllm")
    if not logger.handlers:
        above = logging.getLogger().handlers  # they get our lines anyway
        for handler in theirs.handlers:
            if handler not in above:
                logger.addHandler(handler)
        logger.setLevel(theirs.getEffectiveLevel())
