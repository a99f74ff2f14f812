"""Settings of the real vLLM that every test shares; they must stand before vLLM is imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

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
    yield
    gc.collect()
    if "vllm.envs" in sys.modules:
        sys.modules["vllm.envs"].disable_envs_cache()
