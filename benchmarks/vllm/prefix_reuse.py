#!/usr/bin/env python3
"""How much of its earlier turns a conversation finds in vLLM's prefix cache, by what drafts.

Counts, no times.

    python benchmarks/vllm/prefix_reuse.py --json out.json

SmolLM2-135M in float32 on the real vLLM for the CPU, greedy, prefix caching on. Conversations go on
at once, turn by turn: a prompt is all that was said before and a new question. Each side has an
engine of its own that is given the same prompts, those of plain decoding. Counted are tokens of
prompts from the second turn on: those that the cache could have had at most (whole blocks before
the prompt's last token whose K/V a turn has computed), and those that vLLM found there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_state import origin

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
STOCK: dict[str, Any] = {"enable_nwor": False}
VIEW = {
    "enable_specpv": True,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 3,
    "specpv_n_window_blocks": 2,
}
PAGE = 32  # the CPU backend of any version takes it
PLAIN = "plain"
SIDES = (
    PLAIN,
    "stock, n-grams",
    "staging, n-grams",
    "stock, EAGLE3",
    "staging, EAGLE3",
    "lossless, no head",
    "refresh, n-grams",
)
OPENING = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
FURTHER = "<|im_end|>\n" + OPENING
QUESTIONS = (
    "Tell me a short story about a dog and a river.",
    "What is the dog called, and what does it look like?",
    "Continue the story: the dog meets an old fisherman.",
    "Repeat the last paragraph, word for word.",
    "What would the fisherman say about that day?",
    "Summarise the whole story in two sentences.",
    "Write a letter from the fisherman to his sister about the dog.",
    "List everything that happened, one line for each event.",
)


@dataclass
class Talk:
    """One conversation, as plain decoding has it."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def main() -> int:
    args = parse()
    talks = [Talk() for _ in range(args.conversations)]
    report: dict[str, Any] = origin() | {"model": "SmolLM2-135M-Instruct", "dtype": "float32"}
    report |= {name: getattr(args, name) for name in ("conversations", "turns", "answer_tokens")}
    report |= {"page": PAGE, "sides": []}
    # A process has one engine: vLLM 0.32.0 fails to start some of those that follow another.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for name in args.sides:
            side, talks = pool.submit(run, name, talks, args).result()
            report["sides"].append(side)
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
            print(
                f"{name:18} {side['found']:6} of {side['possible']} tokens in the prefix cache, "
                f"{side['equal_answers']} of {side['answers']} answers equal",
                flush=True,
            )
    return 0


def run(name: str, talks: list[Talk], args: argparse.Namespace) -> tuple[dict, list[Talk]]:
    with tempfile.TemporaryDirectory() as folder:
        side = talk(start(name, Path(folder)), talks, args, writes=name == PLAIN)
    return {"side": name} | side, talks


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=len(QUESTIONS))
    parser.add_argument("--answer-tokens", type=int, default=80)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="plain first")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    if args.sides[0] != PLAIN:
        parser.error(
            f"--sides: got {args.sides[0]!r} first, expected {PLAIN!r}, which the others repeat"
        )
    return args


def start(side: str, folder: Path) -> Any:
    from vllm import LLM

    from nwor_specpv.drafters.vllm_head import write_vllm_head
    from nwor_specpv.models import smollm2
    from nwor_specpv.vllm.specpv.rules import DRAFTER, SCHEDULERS

    target = smollm2("float32")
    kind, _, drafter = side.partition(", ")
    own = {"model": DRAFTER, "method": "custom_class", "num_speculative_tokens": 8}
    nwor = {
        "staging": {"strict": True},
        "lossless": VIEW | {"specpv_draft_passes": 3},
        "refresh": VIEW | {"specpv_mode": "refresh"},
    }.get(kind, STOCK)
    speculation: dict[str, Any] | None = {"n-grams": NGRAM, "no head": own}.get(drafter)
    if drafter == "EAGLE3":
        head = write_vllm_head(folder / "head", target)
        speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
    more = {"scheduler_cls": SCHEDULERS[False]} if kind == "refresh" else {}
    return LLM(
        model=str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        block_size=PAGE,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        speculative_config=speculation,
        additional_config={"nwor_specpv": nwor},
        **more,
    )


def talk(llm: Any, talks: Sequence[Talk], args: argparse.Namespace, *, writes: bool) -> dict:
    """Goes through the conversations; plain decoding `writes` them. What was found of them."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.answer_tokens, ignore_eos=True)
    encode = llm.get_tokenizer().encode
    counted = {"prompt_tokens": 0, "possible": 0, "found": 0, "answers": 0, "equal_answers": 0}
    by_turn = []
    for turn in range(args.turns):
        if writes:
            for number, one in enumerate(talks):
                question = QUESTIONS[(number + turn) % len(QUESTIONS)]
                said = one.prompts[-1] + one.answers[-1] if turn else []
                one.prompts.append(said + encode((FURTHER if turn else OPENING).format(question)))
        prompts = [{"prompt_token_ids": one.prompts[turn]} for one in talks]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = 0
        for one, output in zip(talks, outputs, strict=True):
            answer = list(output.outputs[0].token_ids)
            if writes:
                one.answers.append(answer)
            counted["answers"] += 1
            counted["equal_answers"] += answer == one.answers[turn]
            if turn:
                before = len(one.prompts[turn - 1]) + len(one.answers[turn - 1]) - 1
                counted["prompt_tokens"] += len(one.prompts[turn])
                counted["possible"] += min(before, len(one.prompts[turn]) - 1) // PAGE * PAGE
                found += output.num_cached_tokens
        counted["found"] += found
        by_turn.append(found)
    return counted | {"found_by_turn": by_turn[1:]}


if __name__ == "__main__":
    raise SystemExit(main())
