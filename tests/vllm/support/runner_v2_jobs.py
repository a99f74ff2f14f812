"""Jobs for `runner_v2.py`, which runs model runner V2 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.engine_process import run_script
from support.small_views import SMALL_VIEW, prompts

SCHEDULER = "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler"
SCRIPT = Path(__file__).with_name("processes") / "runner_v2.py"
VIEW = SMALL_VIEW | {
    "specpv_draft_passes": 3,
    "specpv_draft_lookup": 3,
    "check_contract": True,
}
MAX_TOKENS = 24
WITHOUT_HEAD = {"method": "ngram_gpu"}


def job(nwor: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    options = {"nwor": VIEW | (nwor or {}), "scheduler_cls": SCHEDULER} | more.pop("start", {})
    options["speculation"] = {"num_speculative_tokens": 10} | more.pop("speculation", {})
    return {"start": options, "prompts": prompts(), "params": {"max_tokens": MAX_TOKENS}} | more


def run(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    found, log = run_script(folder, list(jobs), SCRIPT)
    print(log[-2000:])
    return found


def check(
    found: dict[str, Any],
    *,
    asynchronous: bool = True,
    speculator: str = "PartialViewSpeculator",
) -> None:
    """The runner and the speculator are those that were asked for, and nothing went wrong."""
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found["speculator"] == speculator
    assert found["async"] is asynchronous
    assert found["violations"] == []
    assert found["fallbacks"] == {}
    assert found["proposals"] > 0
    assert found["cache_written_by_proposals"] == 0
    assert found["failures"] == {}, found["latest_failure"]
