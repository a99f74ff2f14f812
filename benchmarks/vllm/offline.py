#!/usr/bin/env python3
"""Step time and throughput of vLLM with and without the plugin, in alternating runs of one process.

    python benchmarks/vllm/offline.py --model stories --method ngram --batch 8 --context 128
    python benchmarks/vllm/offline.py --model llama-3.1-8b --method eagle3 --batch 1 8 24 \\
        --context 1024 8192 32768 --drafts 4 --acceptance-length 3 --json results.json

`stories` and `smollm2` are real models; `llama-3.1-8b` has that model's shapes and dummy weights,
with acceptance set by hand (`--acceptance-length`: mean tokens of a step, one more than drafts).
Both engines live side by side and take turns, so that clocks and neighbours disturb them alike. A
step's time is the time of a run divided by its steps; the first run of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_shapes import LLAMA_8B, eagle_head, write_config

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@dataclass
class Side:
    """One of the two engines."""

    name: str
    llm: Any
    step_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


def main() -> int:
    args = parse()
    import torch

    with tempfile.TemporaryDirectory() as folder:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        most = max(args.context) + args.tokens + 64
        sides = [
            Side("stock", start(args, Path(folder), most, nwor=False)),
            Side("nwor", start(args, Path(folder), most, nwor=True)),
        ]
        cells = []
        print(f"device {device} · torch {torch.__version__} · {args.model} · {args.method}, "
              f"{args.drafts} drafts · median of {args.runs}, spread in brackets")  # fmt: skip
        print(
            "B x L          stock ms        nwor ms         nwor/stock   stock tok/s   nwor tok/s"
        )
        for context in args.context:
            for batch in args.batch:
                cells.append(measure(args, sides, batch, context))
                print(describe(cells[-1]), flush=True)
        stats = staging_stats()
        print(f"staged {stats['staged_tokens']} = committed {stats['committed_tokens']} + rejected "
              f"{stats['rejected_tokens']}; fallbacks {stats['fallbacks'] or 'none'}")  # fmt: skip
    if args.json:
        result = {
            "device": device,
            "torch": torch.__version__,
            "arguments": vars(args) | {"json": ""},
        }
        Path(args.json).write_text(json.dumps(result | {"cells": cells, "stats": stats}, indent=2))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="stories", help="stories, smollm2, llama-3.1-8b or a path"
    )
    parser.add_argument("--method", choices=("ngram", "eagle3"), default="ngram")
    parser.add_argument("--head", default="", help="EAGLE3 head; default: dummy weights")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--acceptance-length", type=float, default=0.0, help="0: by the model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[128])
    parser.add_argument("--tokens", type=int, default=64, help="to generate per request")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--route", default="", help="attention_route of the plugin")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--json", default="", help="write the results there")
    return parser.parse_args()


def start(args: argparse.Namespace, folder: Path, most: int, *, nwor: bool) -> Any:
    import torch
    from vllm import LLM

    model, options = resolve(args.model, folder)
    speculation: dict[str, Any] = {"method": args.method, "num_speculative_tokens": args.drafts}
    if args.method == "ngram":
        speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        speculation["model"] = args.head or str(eagle_head(folder))
    if args.acceptance_length:
        speculation["rejection_sample_method"] = "synthetic"
        speculation["synthetic_acceptance_length"] = args.acceptance_length
    if torch.cuda.is_available():
        options["attention_backend"] = "CUSTOM" if nwor else "FLASH_ATTN"
        options["gpu_memory_utilization"] = 0.44
        # Given: to find the size itself model runner V1 tries graphs, and drops those of every
        # engine in the process afterwards.
        total = torch.cuda.get_device_properties(0).total_memory
        options["kv_cache_memory_bytes"] = int(0.3 * total)
        if not args.eager:
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            options["compilation_config"] = graphs
    else:
        options |= {"dtype": "float32", "kv_cache_memory_bytes": 512 << 20}
    settings = {"enable_nwor": nwor, "attention_route": args.route}
    return LLM(
        model=model,
        max_model_len=most,
        max_num_seqs=max(args.batch),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=args.eager or not torch.cuda.is_available(),
        speculative_config=speculation,
        additional_config={"nwor_specpv": settings},
        **options,
    )


def resolve(model: str, folder: Path) -> tuple[str, dict[str, Any]]:
    from nwor_specpv.models import smollm2, stories

    if model == "stories":
        return str(stories(64)), {}
    if model == "smollm2":
        return str(smollm2()), {}
    if model == "llama-3.1-8b":
        return str(write_config(folder / "target", LLAMA_8B)), {"load_format": "dummy"}
    return model, {}


def measure(
    args: argparse.Namespace, sides: list[Side], batch: int, context: int
) -> dict[str, Any]:
    for side in sides:
        side.step_ms, side.tokens_per_s = [], []
    for run in range(args.runs + 1):
        for side in sides if run % 2 else sides[::-1]:
            seconds, steps, tokens = decode(side.llm, batch, context, args.tokens)
            if run:
                side.step_ms.append(1e3 * seconds / steps)
                side.tokens_per_s.append(tokens / seconds)
    stock, nwor = sides
    return {
        "batch": batch,
        "context": context,
        **{f"{side.name}_ms": side.step_ms for side in sides},
        **{f"{side.name}_tokens_per_s": side.tokens_per_s for side in sides},
        "ratio": statistics.median(nwor.step_ms) / statistics.median(stock.step_ms),
    }


def decode(llm: Any, batch: int, context: int, num_tokens: int) -> tuple[float, int, int]:
    """Seconds, steps and tokens of decoding alone: the clock starts when all prompts are in."""
    from vllm import SamplingParams

    engine, rng = llm.llm_engine, random.Random(batch * context)
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(batch):
        # Repetitive text, so that n-grams find something.
        words = [rng.randrange(3, vocabulary) for _ in range(16)]
        prompt = [words[i % 16] for i in range(context)]
        engine.add_request(f"{time.monotonic_ns()}-{index}", {"prompt_token_ids": prompt}, params)
    begun: dict[str, int] = {}
    while len(begun) < batch:
        for output in engine.step():
            begun.setdefault(output.request_id, len(output.outputs[0].token_ids))
    ended, steps = dict(begun), 0
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            ended[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
    seconds = time.perf_counter() - started
    return seconds, max(steps, 1), sum(ended.values()) - sum(begun.values())


def staging_stats() -> dict[str, Any]:
    from nwor_specpv.vllm.registry import current_engine

    engine = current_engine()
    assert engine is not None
    assert engine.interceptor is not None, "the plugin was not at work"
    stats = engine.interceptor.stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    return stats


def describe(cell: dict[str, Any]) -> str:
    def told(values: list[float]) -> str:
        middle = statistics.median(values)
        return f"{middle:8.3f} [{(max(values) - min(values)) / 2:.3f}]".ljust(16)

    size = f"{cell['batch']} x {cell['context']}".ljust(13)
    speeds = [statistics.median(cell[f"{name}_tokens_per_s"]) for name in ("stock", "nwor")]
    return (
        f"{size} {told(cell['stock_ms'])}{told(cell['nwor_ms'])}{cell['ratio']:8.3f}"
        f"{speeds[0]:15.0f}{speeds[1]:13.0f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
