"""Data-parallel engines and one front end, as a server has them: this file JOB.json RESULT.json.

job: `start` (arguments of engines.engine_options; where its `speculation` names no method it is a
head of made-up weights), `prompts`, `max_tokens`, and `port`, the first one's metrics. Request i
goes to rank i modulo their number. With VLLM_USE_V2_MODEL_RUNNER=1 engines are on that runner.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import conftest  # noqa: F401  (vLLM's environment)
from support import triton_cpu
from support.engines import engine_options, greedy
from support.heads import story_head
from support.server import get

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    triton_cpu.prepare()  # engines are spawned, so they import this file


async def serve(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = engine_options(job["start"].pop("nwor"), **job["start"])
    ranks = options["data_parallel_size"]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def answer(index: int, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        stream = engine.generate(
            {"prompt_token_ids": prompt},
            greedy(job["max_tokens"]),
            str(index),
            data_parallel_rank=index % ranks,
        )
        async for output in stream:
            tokens = list(output.outputs[0].token_ids)
        return tokens

    try:
        asked = [answer(index, prompt) for index, prompt in enumerate(job["prompts"])]
        tokens = await asyncio.gather(*asked)
        ports = range(job["port"], job["port"] + ranks)
        metrics = [get(f"http://127.0.0.1:{port}/metrics") for port in ports]
    finally:
        engine.shutdown()
    return {"tokens": tokens, "metrics": metrics}


if __name__ == "__main__":
    source, result = map(Path, sys.argv[1:])
    job = json.loads(source.read_text())
    with tempfile.TemporaryDirectory() as folder:
        given = job["start"]["speculation"]
        if "method" not in given:
            job["start"]["speculation"] = story_head(Path(folder), torch.float32) | given
        result.write_text(json.dumps(asyncio.run(serve(job))))
