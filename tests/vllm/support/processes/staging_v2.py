"""Staging alone on model runner V2 in a process of its own: staging_v2.py JOBS RESULTS.

jobs: a list of runs, each with `start` (arguments of engines.start; where its `speculation` names
no method it is a head of made-up weights), `prompts`, `max_tokens` and `again`: prompts that are
run when the others are done, which they may find in the prefix cache. `refuse`: commits of accepted
drafts that are refused as a GPU refuses them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import conftest  # noqa: F401  (vLLM's environment)
from nwor_specpv import Metrics
from nwor_specpv.vllm import faults
from support import triton_cpu
from support.engines import drive, greedy, own_engine, start
from support.engines import stats as own_stats
from support.heads import story_head
from support.refusals import refuse_commits


def main() -> None:
    triton_cpu.prepare()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        head = story_head(Path(folder), torch.float32)
        Path(sys.argv[2]).write_text(json.dumps([run(job, head) for job in jobs]))


def run(job: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    options = job["start"]
    if "method" not in options["speculation"]:
        options["speculation"] = head | options["speculation"]
    llm = start(options.pop("nwor"), **options)
    steps = watch_steps()
    refused = None
    if "refuse" in job:
        drive(llm, job["prompts"][:1], greedy(2))  # the interceptor is made
        faults.PAUSE_SECONDS = 0.0
        refused = refuse_commits(own_engine(), set(job["refuse"]))
    first = drive(llm, job["prompts"], greedy(job["max_tokens"]))
    second = drive(llm, job["again"], greedy(job["max_tokens"]), arrivals=[0, 0, 5])
    return {
        "tokens": [first.tokens, second.tokens],
        "cached": second.cached,
        "steps": steps,
        "stats": own_stats(),
        "violations": own_engine().violations,
        "runner": type(own_engine().runner).__module__,
        "scheduler": type(llm.llm_engine.engine_core.engine_core.scheduler).__name__,
        "refused": refused.num_failed if refused else 0,
        "recoveries": Metrics().snapshot()["nwor_recoveries_total"],
    }


def watch_steps() -> list[list[list[int]]]:
    """For each step: rows and drafts of its requests, and drafts that the scheduler gave them."""
    from nwor_specpv.vllm.steps import Steps

    begin, found = Steps.begin, []

    def watched(
        self: Any, group: int, lens: list[int], drafts: list[int], *rest: Any, **more: Any
    ) -> None:
        begin(self, group, lens, drafts, *rest, **more)
        scheduled = own_engine().scheduled_drafts or []
        found.append([list(lens), list(drafts), list(scheduled)])

    Steps.begin = watched
    return found


if __name__ == "__main__":
    main()
