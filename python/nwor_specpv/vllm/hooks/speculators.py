"""Which speculator model runner V2 builds: ours in mode `lossless` and for draft trees, vLLM's own
otherwise.

One name is replaced, `init_speculator`, after its parameters were compared with those that were
read. It goes when vLLM lets speculators be named by their class.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from nwor_specpv.vllm import versions
from nwor_specpv.vllm.settings import read_settings
from nwor_specpv.vllm.versions.adapter import RUNNER_V2

from .wrapping import replace, when_imported

# Methods whose heads take turns with partial passes, and the one that has no head.
HEADS = ("eagle", "eagle3")
WITHOUT_HEAD = "ngram_gpu"

# Builds our speculator from a VllmConfig and a device.
Factory = Callable[[Any, Any], Any]

problem: str | None = "vLLM has not imported its speculators yet"


def prepare(make_ours: Factory) -> None:
    """Has the name replaced when vLLM imports its package: that takes seconds, and only workers do.

    `make_ours` is called where our speculator is wanted. Calling it again changes nothing.
    """
    module = versions.adapter.make_speculator.module
    when_imported(module, functools.partial(install, make_ours))


def install(make_ours: Factory) -> None:
    """Replaces the name wherever it is; what keeps us from it is left in `problem`."""
    global problem
    made = versions.adapter.make_speculator

    def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_speculator(vllm_config: Any, device: Any, *more: Any) -> Any:
            if wanted(vllm_config) or drafts_trees(vllm_config):
                return make_ours(vllm_config, device)
            return original(vllm_config, device, *more)

        return init_speculator

    problem = replace(made, choosing)
    runner = sys.modules.get(RUNNER_V2)
    if problem is None and runner is not None:  # it has imported the name
        setattr(runner, made.path, getattr(sys.modules[made.module], made.path))


def wanted(vllm_config: Any) -> bool:
    """Whether this engine drafts by partial passes on model runner V2: mode `lossless` with an
    EAGLE head, or without a head."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in (*HEADS, WITHOUT_HEAD):
        return False
    settings = read_settings(vllm_config.additional_config)
    return settings.enable_specpv and settings.enable_nwor and settings.specpv_mode == "lossless"


def drafts_trees(vllm_config: Any) -> bool:
    """Whether a head of this engine drafts trees."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in HEADS:
        return False
    settings = read_settings(vllm_config.additional_config)
    return settings.enable_nwor and settings.draft_tree != "off"


def drafts_without_head(vllm_config: Any) -> bool:
    """Whether it does so without a head."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method == WITHOUT_HEAD and wanted(vllm_config)
