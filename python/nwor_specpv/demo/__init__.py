"""`nwor-specpv demo`: a real model decodes a story with draft tokens that the cache never sees."""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from .decoding import Run, Speculation, decode_plain
from .tiny_model import TinyModel, Tokenizer

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"


def main(argv: list[str]) -> int:
    """Runs the three ways of decoding and prints what each did."""
    parser = argparse.ArgumentParser(prog="nwor-specpv demo", description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    args = parser.parse_args(argv)

    model, tokenizer = TinyModel(), Tokenizer()
    prompt = tokenizer.encode(args.prompt)
    room = model.shape.context - len(prompt)
    if not 1 <= args.max_new_tokens <= room:
        parser.error(
            f"--max-new-tokens: got {args.max_new_tokens}, expected 1 to {room} "
            f"(context {model.shape.context}, prompt {len(prompt)} tokens)"
        )
    with torch.inference_mode():
        ways = {
            "plain": lambda: decode_plain(model, prompt, args.max_new_tokens),
            "chains of 4": lambda: Speculation(model).decode(prompt, args.max_new_tokens, 4, 1),
            "trees, 3 x 4": lambda: Speculation(model).decode(prompt, args.max_new_tokens, 4, 3),
        }
        runs: dict[str, Run] = {}
        seconds: dict[str, float] = {}
        for name, way in ways.items():
            started = time.perf_counter()
            runs[name] = way()
            seconds[name] = time.perf_counter() - started

    plain = runs["plain"]
    ok = all(run.tokens == plain.tokens and not run.violations for run in runs.values())
    if args.json:
        report = {
            name: {
                "tokens": len(run.tokens),
                "steps": run.steps,
                "seconds": seconds[name],
                "same_tokens": run.tokens == plain.tokens,
                "violations": [repr(violation) for violation in run.violations],
                "stats": run.stats,
            }
            for name, run in runs.items()
        }
        text = tokenizer.decode(prompt + plain.tokens)
        print(json.dumps({"text": text, "runs": report, "ok": ok}, indent=2))
        return 0 if ok else 1
    _print_report(tokenizer.decode(prompt + plain.tokens), runs)
    if not ok:
        print("FAILED: a way of decoding gave other tokens or broke the contract", file=sys.stderr)
    return 0 if ok else 1


def _print_report(text: str, runs: dict[str, Run]) -> None:
    plain = runs["plain"]
    print(f"A 260K-parameter model tells a story, greedy, {len(plain.tokens)} tokens:\n")
    print("  " + text.replace("\n", "\n  ") + "\n")
    print("Drafts come from the story so far (n-grams). Draft K/V waits in staging; only accepted")
    print("rows are committed to the paged cache, in every layer or in none.\n")
    columns = (
        ("decoding", 14),
        ("steps", 7),
        ("tokens/step", 13),
        ("drafts", 8),
        ("accepted", 10),
        ("never written", 15),
        ("bytes avoided", 15),
        ("same tokens", 13),
        ("contract", 9),
    )
    print("".join(title.rjust(width) for title, width in columns))
    for name, run in runs.items():
        stats = run.stats
        cells = [name, str(run.steps), f"{len(run.tokens) / run.steps:.2f}"]
        if stats:
            cells += [
                str(stats["staged_tokens"]),
                str(stats["committed_tokens"]),
                str(stats["rejected_tokens"]),
                f"{stats['cache_bytes_avoided']:,}",
                "yes" if run.tokens == plain.tokens else "NO",
                "kept" if not run.violations else "BROKEN",
            ]
        else:
            cells += ["-", "-", "-", "-", "", ""]
        print("".join(cell.rjust(width) for cell, (_, width) in zip(cells, columns, strict=True)))
    print(
        "\nA step is one pass of the model. 'never written' drafts were attended to and rejected:\n"
        "no byte of theirs is in any layer's cache, checked after every step against hashes of\n"
        "every cache slot ('contract')."
    )
