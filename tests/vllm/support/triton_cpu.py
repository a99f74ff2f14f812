"""Model runner V2 on a CPU: vLLM's Triton kernels in Triton's interpreter.

vLLM has that runner for Triton's CPU backend, which PyPI does not carry; the interpreter does the
same, slowly. For a process of its own, before vLLM is imported: vLLM replaces parts of torch there.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any

from support.installed import VERSION


def prepare(*, asynchronous: bool = True) -> None:
    """From here on vLLM finds Triton, and takes model runner V2, by default with asynchronous
    scheduling."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=None, compiler=None)
    version = importlib.metadata.version
    # vLLM looks up the package of its own name to learn that it is built for the CPU.
    importlib.metadata.version = lambda name: f"{VERSION}+cpu" if name == "vllm" else version(name)
    try:
        import vllm.triton_utils as found
    finally:
        importlib.metadata.version = version
    assert found.HAS_TRITON

    from support import triton_functions

    found.tldevice.log1p = triton_functions.log1p
    if asynchronous:
        _schedule_asynchronously()


def _schedule_asynchronously() -> None:
    """As on a GPU; the CPU platform switches it off, as it gains nothing there."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)
