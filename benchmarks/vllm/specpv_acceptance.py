#!/usr/bin/env python3
"""How many drafts over a view a full step confirms, by the size of the view and what is in it.

    python benchmarks/vllm/specpv_acceptance.py --text BOOK.txt --json out.json      # measure
    python benchmarks/vllm/specpv_acceptance.py --plot docs/specpv_acceptance.svg --json out.json

SmolLM2-135M in float32 on the real vLLM for the CPU, greedy, mode lossless, 16 drafts by 16 partial
passes and no lookups. Requests of two kinds, from several passages of a text: a book goes on, at
several places, and questions at its end are about its beginning. The engine writes their
continuations once. Then proposals start at the same places of the same continuations with
every kind of view; what a full step would confirm of a proposal is what it has in common with the
continuation. Standard errors are those of the requests' means: places of one request are alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import operator
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

DRAFTS = 16
BLOCK = 16
SINK, WINDOW = 2, 8  # blocks
KINDS = ("specpv", "quest", "sinks + window", "sliding")
TASKS = ("book", "question")
STARTS = 4  # where a book goes on, of each passage
QUESTIONS = (
    "What is the name of the horse, how old is it, and which village did it come from? Answer in "
    "full sentences.",
    "Who owns the horse, and what does it pull? Answer in full sentences.",
    "Repeat what was said about the horse at the very beginning, word for word.",
    "Write a letter to the miller about his horse: its name, its age, its village and its cart.",
)
# What a trial of this approach had found before, with the same model and texts of its own.
TRIAL = {
    "specpv": {"512": [7.0, 5.0], "1024": [10.9, 8.4], "2048": [13.2, 11.7]},
    "sinks + window": {"512": [6.5, 1.8], "1024": [9.5, 2.3]},
}
COLOURS = {"specpv": "s0", "quest": "s1", "sinks + window": "s2", "sliding": "s3"}


def main() -> int:
    args = parse()
    if args.plot:
        Path(args.plot).write_text(draw(json.loads(Path(args.json).read_text())))
        return 0
    requests = args.passages * (STARTS + len(QUESTIONS))
    llm = start(args.context, requests)
    text = Path(args.text).read_text()
    prompts = make_prompts(llm.get_tokenizer(), text, args.context, args.passages)
    record(args, drafter_of(llm), write_on(llm, prompts, max(args.places) + DRAFTS))
    return 0


def record(args: argparse.Namespace, drafter: Any, batch: Batch) -> None:
    """Measures cell by cell and writes what there is after each."""
    from nwor_specpv._stamp import read_stamp

    result: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "dtype": "float32"}
    result |= {"context": args.context, "drafts": DRAFTS, "text": Path(args.text).name}
    result |= {"passages": args.passages, "places": args.places, "trial": TRIAL}
    result |= {"select_interval": args.select_interval, "commit": read_stamp().revision}
    result |= {"cells": []}
    for budget in args.budgets:
        for kind in args.kinds:
            began = time.monotonic()
            cell = {"budget": budget, "view": kind}
            keys = {"specpv_draft_select_interval": args.select_interval}
            cell |= measure(drafter, batch, args.places, keys | view_settings(kind, budget))
            result["cells"].append(cell)
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
            told = ", ".join(
                f"{task} {cell[task]['mean_accepted']:.2f} +- {cell[task]['standard_error']:.2f}"
                for task in TASKS
            )
            print(f"{budget:5} {kind:15} {told}  ({time.monotonic() - began:.0f} s)", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", default="", help="a long text in English")
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--select-interval", type=int, default=1, help="passes; 0: chosen once")
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--places", type=int, nargs="+", default=[0, 18, 36, 54])
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


def drafter_of(llm: Any) -> Any:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.drafter


def make_prompts(
    tokenizer: Any, text: str, context: int, passages: int
) -> list[tuple[str, list[int]]]:
    """Task and token ids, of about `context` tokens; those of a passage share their beginnings."""
    head = tokenizer.encode(
        "<|im_start|>user\nThe name of the horse is Arkady, it is seven years old and it came from "
        "the village of Sosnovka. It belongs to the miller Yefim and pulls a green cart. Keep this "
        "in mind while you read.\n\n"
    )
    prompts = []
    for passage in range(passages):
        start = len(text) * (1 + passage) // (2 + passages)
        book = tokenizer.encode(text[start : start + 8 * context])
        prompts += [("book", book[: context - 48 * number]) for number in range(STARTS)]
        for question in QUESTIONS:
            turn = f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
            asked = head + book[: context - 100 - len(head)] + tokenizer.encode(turn)
            prompts.append(("question", asked))
    return prompts


@dataclass
class Batch:
    """Requests that stay where they are: their texts with continuations, and their pages."""

    tasks: list[str]
    prompts: list[int]  # tokens
    texts: list[list[int]]
    block_table: Any


def write_on(llm: Any, prompts: list[tuple[str, list[int]]], tokens: int) -> Batch:
    """Lets the engine write `tokens` after each prompt, and keeps all of it in the cache."""
    from vllm import SamplingParams

    drafter, engine = drafter_of(llm), llm.llm_engine
    longest = drafter._shortest
    drafter._shortest = 10**9  # lookups alone
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": p} for _, p in prompts], params, use_tqdm=False)
    said = [list(output.outputs[0].token_ids) for output in found]
    texts = [prompt + tokens for (_, prompt), tokens in zip(prompts, said, strict=True)]
    propose = drafter.propose
    drafter.propose = lambda sampled, *_, **__: [[] for _ in sampled]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for number, text in enumerate(texts):
        engine.add_request(str(number), {"prompt_token_ids": text}, params)
    begun: set[str] = set()
    while len(begun) < len(prompts):  # then none has ended
        begun |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    drafter.propose, drafter._shortest = propose, longest
    names = drafter._engine.runner.input_batch.req_ids[: len(prompts)]
    order = [int(name.partition("-")[0]) for name in names]
    return Batch(
        [prompts[i][0] for i in order],
        [len(prompts[i][1]) for i in order],
        [texts[i] for i in order],
        drafter._engine.seen.block_table.clone(),
    )


def measure(
    drafter: Any, batch: Batch, places: Sequence[int], keys: dict[str, Any]
) -> dict[str, Any]:
    """What full steps would accept of proposals that start `places` tokens after the prompts."""
    import torch

    reconfigure(drafter, keys)
    drafter._allocate()
    count, seen = len(batch.texts), SimpleNamespace(block_table=batch.block_table)
    rows = [drafter._store.open() for _ in range(count)]
    accepted: list[list[int]] = [[] for _ in range(count)]
    for place in places:
        lens = [prompt + place for prompt in batch.prompts]
        requests = [
            SimpleNamespace(row=row, index=Root(text[length - 1]))
            for row, text, length in zip(rows, batch.texts, lens, strict=True)
        ]
        with torch.inference_mode():
            chains = drafter._draft_by_passes(list(range(count)), requests, lens, seen, DRAFTS)
        for number, (text, length) in enumerate(zip(batch.texts, lens, strict=True)):
            following = text[length : length + DRAFTS]
            same = map(operator.eq, chains[number], following)
            accepted[number].append(sum(takewhile(bool, same)))
    found: dict[str, Any] = {}
    for task in TASKS:
        mine = [run for run, kind in zip(accepted, batch.tasks, strict=True) if kind == task]
        means = [statistics.mean(run) for run in mine]
        error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
        found[task] = {"mean_accepted": statistics.mean(means), "standard_error": error}
        found[task]["accepted"] = mine
    return found


@dataclass
class Root:
    """Stands for a request's index of its own tokens: the last one, and no lookups."""

    last: int

    def lookup(self, *_: Any) -> list[int]:
        return []


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
            x = x0 + 20 + index * (width - 40) / max(1, len(budgets) - 1)
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
            cells = sorted(
                (cell for cell in result["cells"] if cell["view"] == kind),
                key=lambda cell: cell["budget"],
            )
            points = []
            for cell in cells:
                index, found = budgets.index(cell["budget"]), cell[task]
                points.append(place(index, found["mean_accepted"]))
                ends = [found["mean_accepted"] + s * found["standard_error"] for s in (-1, 1)]
                bar = " ".join(place(index, min(DRAFTS, end)) for end in ends)
                lines.append(f'<polyline class="{COLOURS[kind]}" opacity="0.4" points="{bar}"/>')
            lines.append(f'<polyline class="{COLOURS[kind]}" points="{" ".join(points)}"/>')
    for index, kind in enumerate(KINDS):
        x = left + index * 170
        lines.append(
            f'<line class="{COLOURS[kind]}" stroke-width="3" x1="{x}" x2="{x + 24}" '
            f'y1="{top + height + 52}" y2="{top + height + 52}"/>'
        )
        lines.append(f'<text x="{x + 32}" y="{top + height + 56}">{kind}</text>')
    lines.append(
        f'<text x="{left}" y="{top + height + 84}">tokens of the view, without the drafts; bars: a '
        "standard error up and down</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    raise SystemExit(main())
