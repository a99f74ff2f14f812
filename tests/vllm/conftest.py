"""Settings of the real vLLM that every test shares; they must stand before vLLM is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from support.engines import override_kernels_once, release_engines

# In this process: engines start in a second once vLLM is imported, and tests can look inside.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# vLLM compiles its sampler on the CPU; to find out what vectors compilers have, torch starts ten
# Pythons in every process that does.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test stands for goes to the JUnit file: see tools/compatibility.py."""
    for item in items:
        for mark in item.iter_markers("serves"):
            item.user_properties.append(("serves", " on ".join(mark.args)))


@pytest.fixture(autouse=True, scope="session")
def _kernels_of_engines() -> None:
    """Before a test imports anything that vLLM's replacing of kernels cannot bear."""
    override_kernels_once()


@pytest.fixture(autouse=True)
def _one_engine_at_a_time() -> Iterator[None]:
    """Engines of a test are gone before the next one starts."""
    if hasattr(sys, "last_traceback"):  # of a test that failed: its frames hold engines
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
        release_engines()
    yield
    release_engines()
