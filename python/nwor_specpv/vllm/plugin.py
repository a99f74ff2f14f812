"""The entry point: vLLM calls `register` in every process, possibly more than once.

It names our backends, has `enable_specpv` fill in what users leave open (`hooks.arguments`), and
returns; what can be refused is judged when an engine is built, where its configuration is known. On
CUDA users choose us (`--attention-backend CUSTOM`); the CPU platform has one backend whatever is
asked, so there ours stands in its place.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nwor_specpv.errors import NworError, logger

from . import versions
from .hooks import arguments, runner_choice, speculators
from .settings import read_settings

CUDA_BACKEND = "nwor_specpv.vllm.backend.cuda.NworFlashBackend"
CPU_BACKEND = "nwor_specpv.vllm.backend.cpu.NworCpuBackend"


def register() -> None:
    """Registers the backends with this process' vLLM. Calling it again changes nothing."""
    import vllm
    from vllm.version import __version__ as version

    problem, warning = versions.choose(version, Path(vllm.__file__).absolute().parents[1])
    if problem is not None:
        if read_settings(None).strict:
            raise NworError(f"nwor_specpv: {problem}")
        logger.warning("nwor_specpv is off: %s", problem)
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _log_as_vllm_does()
    if warning is not None:
        logger.warning("nwor_specpv: %s", warning)
    speculators.prepare(_make_speculator)
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
