#!/usr/bin/env python3
"""Tokens per second with drafts and views beside plain decoding, over batches, lengths and texts.

    python benchmarks/generate_matrix.py --json FILE [--batch 1,4,8] [--context 100,2048,6144]

SmolLM2-135M-Instruct, greedy. A cell is a batch, a length of the prompts and a kind of text: a
book, a log with a question, source code. In each cell all ways run in turn, each with a generator
of its own that shares the cache, so that a prompt is read once. The order changes from round to
round. The first round, in which costs are measured and sizes tried, counts: it is what a first call
gets. FILE is written after every cell. A run with the same FILE goes on with the missing cells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nwor_specpv._files import write_whole
from nwor_specpv.bench.report import machine
from nwor_specpv.cli.demo.texts import book_prompt, long_prompt
from nwor_specpv.cli.generate import view_config
from nwor_specpv.cli.parser import EXIT_USAGE, Parser, count, counts
from nwor_specpv.errors import NworError

GOAL = 0.97  # of plain decoding, in every cell
KINDS = ("book", "log", "code")
WAYS = ("none", "ngram", "eagle3", "lossless")
_APART = 997  # tokens between the beginnings of prompts, so that they share none


def make_prompts(tokenizer: Any, kind: str, batch: int, length: int) -> list[list[int]]:
    """Prompts of one text that begin at different places."""
    if kind == "log":
        return [long_prompt(tokenizer, length, seed=1 + i) for i in range(batch)]
    needed = length + _APART * (batch - 1)
    if kind == "book":
        ids = book_prompt(tokenizer, needed)
    else:
        source = Path(argparse.__file__).read_text("utf-8")
        ids = list(tokenizer(source).input_ids)
        ids = list(itertools.islice(itertools.cycle(ids), needed))
    return [ids[_APART * i : _APART * i + length] for i in range(batch)]


def cells(batches: list[int], contexts: list[int]) -> Iterator[dict[str, Any]]:
    for context, batch, kind in itertools.product(contexts, batches, KINDS):
        yield {"batch": batch, "context": context, "kind": kind}


def run_cell(
    ways: dict[str, Callable[[list[list[int]], int], Any]],
    prompts: list[list[int]],
    tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Tokens per second of each way, and its share of plain decoding in the same round."""
    names, rates, texts = list(ways), {name: [] for name in ways}, {}
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order:
            told = ways[name](prompts, tokens)
            rates[name].append(told.stats.tokens_per_second)
            texts[name] = told.token_ids
    plain = rates["none"]
    return {
        "rates": rates,
        "of_plain": {
            name: statistics.median(a / b for a, b in zip(own, plain, strict=True))
            for name, own in rates.items()
        },
        "same_tokens": {name: texts[name] == texts["none"] for name in names},
    }


def make_ways(model: Any, tokenizer: Any) -> dict[str, Callable[[list[list[int]], int], Any]]:
    from nwor_specpv.transformers import Generator

    first = Generator(model, tokenizer, "none")
    own = {name: Generator(drafter=name, cache_of=first) for name in WAYS[1:3]}
    viewing = view_config("lossless", 1024)
    own |= {"none": first, "lossless": Generator(drafter="eagle3", specpv=viewing, cache_of=first)}

    def way(name: str) -> Callable[[list[list[int]], int], Any]:
        return lambda prompts, tokens: own[name].generate(prompts, tokens, eos_token_id=-1)

    return {name: way(name) for name in WAYS}


def read_record(path: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run has left; raises if it was another one's."""
    if not path.exists():
        return setting | {"goal": GOAL, "cells": []}
    try:
        record = json.loads(path.read_text("utf-8"))
        before = {name: record[name] for name in setting}
        record["cells"][:0] = []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise NworError(f"--json: got {str(path)!r}, which is no record of this script") from None
    if before != setting:
        raise NworError(f"--json: got {str(path)!r} of another setting, expected a new file")
    return record


def main(argv: list[str]) -> int:
    parser = Parser(prog="generate_matrix.py", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the record; it is gone on with")
    parser.add_argument("--batch", type=counts, default=[1, 4, 8])
    parser.add_argument("--context", type=counts, default=[100, 2048, 6144])
    parser.add_argument("--tokens", type=count, default=128, help="of each answer, default: 128")
    parser.add_argument("--rounds", type=count, default=4, help="default: 4")
    parser.add_argument("--threads", type=count, help="default: torch's")
    arguments = parser.parse_args(argv)
    import torch

    from nwor_specpv.transformers import load_model

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    setting = {
        **machine("cpu"),
        "threads": torch.get_num_threads(),
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
    }
    record = read_record(arguments.json, setting)
    done = [{name: one[name] for name in ("batch", "context", "kind")} for one in record["cells"]]
    missing = [cell for cell in cells(arguments.batch, arguments.context) if cell not in done]
    ways: dict[str, Any] = {}
    for cell in missing:
        if not ways:
            model, tokenizer = load_model()
            ways = make_ways(model, tokenizer)
        prompts = make_prompts(tokenizer, cell["kind"], cell["batch"], cell["context"])
        told = run_cell(ways, prompts, arguments.tokens, arguments.rounds)
        record["cells"].append(cell | told)
        write_whole(arguments.json, json.dumps(record, indent=1) + "\n")
        shares = ", ".join(f"{name} {share:.2f}" for name, share in told["of_plain"].items())
        print(f"{cell['batch']} x {cell['context']} {cell['kind']}: {shares}", flush=True)
    worst = min(share for one in record["cells"] for share in one["of_plain"].values())
    print(f"least share of plain decoding: {worst:.2f}, goal {GOAL}")
    return 0 if worst >= GOAL else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NworError as error:
        print(f"generate_matrix.py: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
