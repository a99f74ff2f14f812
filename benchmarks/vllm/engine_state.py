"""What the benchmarks of an engine share: its versions, its worker, and what the plugin counted."""

from __future__ import annotations

from typing import Any


def origin() -> dict[str, str]:
    """What is measured, by its versions."""
    import torch
    import vllm

    from nwor_specpv import _stamp

    versions = {"torch": torch.__version__, "vllm": vllm.version.__version__}
    return {"commit": _stamp.read_stamp().revision} | versions


def worker_runner(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def counts() -> dict[str, Any]:
    """What was counted, and what went wrong in drafting: the head may have drafted alone."""
    from nwor_specpv import Metrics
    from nwor_specpv.vllm.registry import current_engine

    found = {
        name: value
        for name, value in Metrics().snapshot().items()
        if value and name.startswith(("specpv_", "nwor_staged", "nwor_committed", "nwor_fallback"))
    }
    engine = current_engine()
    if engine is not None and engine.draft_failures.latest:
        found["draft_failure"] = engine.draft_failures.latest
        print(f"  drafting over views failed: {engine.draft_failures.latest}", flush=True)
    return found
