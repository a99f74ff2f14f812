"""Data-parallel engines and one front end, as a server has them: this file JOB.json RESULT.json.

job: `start` (arguments of engines.engine_options), `prompts`, `max_tokens`, and `port`, the first
one's metrics. Request i goes to rank i modulo their number.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  (vLLM's environment)
from support.engines import engine_options, greedy
from support.server import get


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
    result.write_text(json.dumps(asyncio.run(serve(json.loads(source.read_text())))))
