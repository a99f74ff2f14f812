"""Mode `refresh` on model runner V2 in a process of its own: refresh_v2.py JOB RESULT.

job: `start` (arguments of engines.start), `prompts`, `max_tokens`. A first short request tells the
worker who runs it; then the prompts, then the prompts with their answers behind them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import conftest  # noqa: F401  (vLLM's environment)
from support import triton_cpu
from support.engines import counted, drive, greedy, own_engine, start
from support.heads import story_head
from support.prefix_cache_blocks import count_published_blocks, scheduler_of, watch_requests


def main() -> None:
    triton_cpu.prepare()
    job = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        head = story_head(Path(folder), torch.float32)
        Path(sys.argv[2]).write_text(json.dumps(run(job, head)))


def run(job: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    options, prompts, most = job["start"], job["prompts"], job["max_tokens"]
    options["speculation"] = head | options["speculation"]
    llm = start(options.pop("nwor"), **options)
    requests, decisions = watch_requests(llm), watch_decisions()
    drive(llm, [[1, 5, 9]], greedy(2))
    story = drive(llm, prompts, greedy(most))
    full_tokens = scheduler_of(llm).full_tokens
    blocks = count_published_blocks(llm, requests, full_tokens)
    longer = [prompt + story.tokens[str(i)] for i, prompt in enumerate(prompts)]
    return {
        "tokens": story.tokens,
        "full_tokens": full_tokens,
        "published": blocks,
        "decisions": decisions,
        "preemptions": counted(llm, "vllm:num_preemptions"),
        "cached": drive(llm, longer, greedy(1)).cached,
        "runner": type(own_engine().runner).__module__,
        "async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        "violations": own_engine().violations,
    }


def watch_decisions() -> list[tuple[int, int, bool, bool]]:
    """Context and rows of every request in every step, whether it is prefilling, whether it had or
    chose a view."""
    from nwor_specpv.vllm.specpv.refresh_requests import RefreshRequests

    decide, found = RefreshRequests._decide, []

    def watched(self: Any, name: str, context: int, rows: int, *args: Any, in_front: bool) -> Any:
        made = decide(self, name, context, rows, *args, in_front=in_front)
        found.append((context, rows, args[-1], made.partial or made.select))
        return made

    RefreshRequests._decide = watched
    return found


if __name__ == "__main__":
    main()
