"""Settings of the real vLLM that every test shares; they must stand before vLLM is imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch

# In this process: engines start in a second once vLLM is imported, and tests can look inside.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _one_engine_at_a_time() -> Iterator[None]:
    """Engines of a test are gone before the next one starts: their caches are not small.

    An engine freezes what vLLM has read from the environment; the next one reads it anew.
    """
    if hasattr(sys, "last_traceback"):  # of a test that failed: its frames hold engines
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        _collect()
    yield
    _collect()
    if "vllm.envs" in sys.modules:
        sys.modules["vllm.envs"].disable_envs_cache()


def _collect() -> None:
    """Frees what nobody uses, and what vLLM has hidden from the collector: all of an engine.

    Engines keep their graphs in one pool of memory. torch lets no graph into a pool that has lost
    all its graphs while some of its memory is in use, so those to come have another. Workspaces of
    cuBLAS, too: they would be freed at the next capture, while vLLM measures what is free.
    """
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    if "vllm.platforms" in sys.modules:
        type(sys.modules["vllm.platforms"].current_platform)._global_graph_pool = None
