#!/usr/bin/env python3
"""How many drafts over a view a full step confirms, by the size of the view and what is in it.

    python benchmarks/vllm/specpv_acceptance.py --text BOOK.txt --json out.json      # measure
    python benchmarks/vllm/specpv_acceptance.py --plot docs/specpv_acceptance.svg --json out.json

SmolLM2-135M in float32 on the real vLLM for the CPU, greedy, mode lossless, 16 drafts by 16 partial
passes and no lookups. Requests of two kinds, from several passages of a text: a book goes on, and a
question at its end is about its beginning. Their prompts are computed once; every kind of view
starts from the same cache. Few tokens of each, as small models soon repeat themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

DRAFTS = 16
BLOCK = 16
SINK, WINDOW = 2, 8  # blocks
KINDS = ("specpv", "quest", "sinks + window", "sliding")
TASKS = ("book", "question")
COLOURS = {"specpv": "s0", "quest": "s1", "sinks + window": "s2", "sliding": "s3"}


def main() -> int:
    args = parse()
    if args.plot:
        Path(args.plot).write_text(draw(json.loads(Path(args.json).read_text())))
        return 0
    llm = start(args.context, len(TASKS) * args.passages)
    tokenizer = llm.get_tokenizer()
    prompts = make_prompts(tokenizer, Path(args.text).read_text(), args.context, args.passages)
    result: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "dtype": "float32"}
    result |= {"context": args.context, "drafts": DRAFTS, "tokens": args.tokens}
    result |= {"text": Path(args.text).name, "cells": []}
    for budget in args.budgets:
        for kind in KINDS:
            began = time.monotonic()
            cell = {"budget": budget, "view": kind} | measure(
                llm, prompts, kind, budget, args.tokens
            )
            result["cells"].append(cell)
            Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
            means = ", ".join(f"{task} {cell[task]['mean_accepted']:.1f}" for task in TASKS)
            print(f"{budget:5} {kind:15} {means}  ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", default="", help="a long text in English")
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24, help="of each request")
    parser.add_argument("--json", required=True)
    parser.add_argument("--plot", default="", help="draw a recorded result instead")
    return parser.parse_args()


def view_settings(kind: str, budget: int) -> dict[str, Any]:
    """Keys of a view of `budget` tokens."""
    blocks = budget // BLOCK
    if kind == "sliding":
        return {"specpv_selector": "sliding", "specpv_n_window_blocks": blocks}
    if kind == "sinks + window":
        return {"specpv_selector": "streaming", "specpv_n_window_blocks": blocks - SINK}
    return {
        "specpv_selector": "specpv",
        "specpv_score": kind,
        "specpv_n_window_blocks": WINDOW,
        "specpv_n_retrieval_blocks": blocks - SINK - WINDOW,
    }


def start(context: int, requests: int) -> Any:
    from vllm import LLM

    from nwor_specpv.models import smollm2
    from nwor_specpv.vllm.specpv.rules import DRAFTER

    settings = {
        "enable_specpv": True,
        "specpv_n_sink_blocks": SINK,
        "specpv_n_retrieval_blocks": BLOCK,
        "specpv_draft_passes": DRAFTS,
        "specpv_draft_lookup": 0,
        "specpv_max_requests": requests,
    }
    speculation = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": DRAFTS}
    return LLM(
        model=str(smollm2("float32")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=context + 192,
        max_num_seqs=requests,
        max_num_batched_tokens=1024,
        block_size=BLOCK,
        kv_cache_memory_bytes=requests * (context + 512) * 30 * 3 * 64 * 2 * 4,
        speculative_config=speculation,
        additional_config={"nwor_specpv": settings},
    )


def make_prompts(
    tokenizer: Any, text: str, context: int, passages: int
) -> list[tuple[str, list[int]]]:
    """Task and token ids; lengths are about `context` and all different: they tell requests."""
    head = tokenizer.encode(
        "<|im_start|>user\nThe name of the horse is Arkady, it is seven years old and it came from "
        "the village of Sosnovka. Keep this in mind while you read.\n\n"
    )
    tail = tokenizer.encode(
        "\n\nWhat is the name of the horse, how old is it, and which village did it come from? "
        "Answer in full sentences.<|im_end|>\n<|im_start|>assistant\n"
    )
    prompts = []
    for passage in range(passages):
        start = len(text) * (1 + passage) // (2 + passages)
        book = tokenizer.encode(text[start : start + 8 * context])
        length = context - 2 * passage
        asked = head + book[: length - 1 - len(head) - len(tail)] + tail
        prompts += [("book", book[:length]), ("question", asked)]
    return prompts


def measure(
    llm: Any, prompts: list[tuple[str, list[int]]], kind: str, budget: int, tokens: int
) -> dict[str, Any]:
    """Accepted drafts of every full step, by task."""
    from vllm import SamplingParams

    found: dict[str, list[int]] = {task: [] for task in TASKS}
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafter = worker.model_runner.drafter
    reconfigure(drafter, view_settings(kind, budget))
    tasks = {len(prompt): task for task, prompt in prompts}
    judge = type(drafter)._judge

    def watched(request: Any, scheduled: int, accepted: int) -> None:
        if request.by_view and scheduled == DRAFTS:
            found[tasks[request.state.num_prompt_tokens]].append(accepted)
        judge(drafter, request, scheduled, accepted)

    drafter._judge = watched
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate([{"prompt_token_ids": p} for _, p in prompts], params, use_tqdm=False)
    return {
        task: {"mean_accepted": statistics.mean(accepted or [0]), "accepted": accepted}
        for task, accepted in found.items()
    }


def reconfigure(drafter: Any, keys: dict[str, Any]) -> None:
    """The drafter with other views, as if it had been started with them."""
    settings = drafter._settings = dataclasses.replace(drafter._settings, **keys)
    drafter._config = settings.specpv()
    drafter._shortest = drafter._config.budget(1 + DRAFTS).static_tokens
    drafter._requests.clear()
    drafter._store = drafter._tail = None


def draw(result: dict[str, Any]) -> str:
    """Two panels, mean accepted drafts over the size of the view; plain SVG."""
    budgets = sorted({cell["budget"] for cell in result["cells"]})
    width, height, left, top, step = 330, 250, 56, 56, 380
    title = f"{result['model']}, {result['context']} tokens of context: accepted of {DRAFTS} drafts"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 400" width="800" height="400" '
        f'role="img" aria-label="{title}">',
        "<style>text { font: 13px system-ui, sans-serif; fill: #1f2328; } .b { font-weight: 600; } "
        ".g { stroke: #d1d9e0; } polyline { fill: none; stroke-width: 2; } "
        ".s0 { stroke: #0969da; } .s1 { stroke: #bc4c00; } .s2 { stroke: #8250df; } "
        ".s3 { stroke: #59636e; } @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } "
        ".g { stroke: #3d444d; } }</style>",
        f'<text class="b" x="{left}" y="22">{title}</text>',
    ]
    for panel, task in enumerate(TASKS):
        x0 = left + panel * step

        def place(index: int, value: float, x0: int = x0) -> str:
            x = x0 + 20 + index * (width - 40) / (len(budgets) - 1)
            return f"{x:.1f},{top + height * (1 - value / DRAFTS):.1f}"

        said = "a book goes on" if task == "book" else "a question about the beginning"
        lines.append(f'<text x="{x0}" y="44">{said}</text>')
        for value in range(0, DRAFTS + 1, 4):
            y = top + height * (1 - value / DRAFTS)
            lines.append(f'<line class="g" x1="{x0}" x2="{x0 + width}" y1="{y}" y2="{y}"/>')
            lines.append(f'<text x="{x0 - 8}" y="{y + 4}" text-anchor="end">{value}</text>')
        for index, budget in enumerate(budgets):
            x = place(index, 0).partition(",")[0]
            lines.append(
                f'<text x="{x}" y="{top + height + 20}" text-anchor="middle">{budget}</text>'
            )
        for kind in KINDS:
            points = [
                place(budgets.index(cell["budget"]), cell[task]["mean_accepted"])
                for cell in result["cells"]
                if cell["view"] == kind
            ]
            lines.append(f'<polyline class="{COLOURS[kind]}" points="{" ".join(points)}"/>')
    for index, kind in enumerate(KINDS):
        x = left + index * 170
        lines.append(
            f'<line class="{COLOURS[kind]}" stroke-width="3" x1="{x}" x2="{x + 24}" '
            f'y1="{top + height + 52}" y2="{top + height + 52}"/>'
        )
        lines.append(f'<text x="{x + 32}" y="{top + height + 56}">{kind}</text>')
    lines.append(
        f'<text x="{left}" y="{top + height + 84}">tokens of the view, without the drafts</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    raise SystemExit(main())
