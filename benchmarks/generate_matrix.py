#!/usr/bin/env python3
"""Tokens per second with drafts and views beside plain decoding, over batches, lengths and texts.

    python benchmarks/generate_matrix.py --json benchmarks/results/cpu/generate_matrix.json

SmolLM2-135M-Instruct, greedy. A cell is a batch, a length of the prompts and a kind of text: a
book, a log with a question, source code. In each cell all ways run in turn over the same prompts,
each with a generator of its own; the generators share the cache, so that a prompt is read once, and
only decoding is timed. The order of the ways changes from round to round. Each kind of text begins
with new generators, so that nothing is known of a batch and a length in its first round. That round
counts: it is what a first call gets. A way's share is its tokens per second in all rounds together,
relative to those of plain decoding.

FILE is written after every cell. A run with the same FILE goes on with the missing cells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
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
_MORE_ROWS = 128  # of the cache for an end: a page, the largest tree, and a view's tail

Way = Callable[[list[list[int]], int], Any]


def make_prompts(tokenizer: Any, kind: str, batch: int, length: int) -> list[list[int]]:
    """Prompts of one text that begin at different places; fewer are the first of more."""
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
    """Large batches first: the prompts of smaller ones have been read then."""
    for kind, context, batch in itertools.product(KINDS, contexts, sorted(batches, reverse=True)):
        yield {"batch": batch, "context": context, "kind": kind}


def run_cell(
    ways: dict[str, Way], prompts: list[list[int]], tokens: int, rounds: int
) -> dict[str, Any]:
    """Tokens per second of each way in each round, and its shares of plain decoding."""
    for way in reversed(ways.values()):  # reads the prompts, and first for those with features
        way(prompts, 1)
    names, rates, texts = list(ways), {name: [] for name in ways}, {}
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            told = ways[name](prompts, tokens)
            rates[name].append(told.stats.tokens_per_second)
            texts[name] = told.token_ids
    plain = rates["none"]
    # Every round has as many tokens: their time is the mean of what one took.
    seconds = {name: sum(1 / rate for rate in own) for name, own in rates.items()}
    return {
        "load_average": os.getloadavg()[0],
        "rates": rates,
        "of_plain": {name: seconds["none"] / own for name, own in seconds.items()},
        "first_of_plain": {name: own[0] / plain[0] for name, own in rates.items()},
        "same_tokens": {name: texts[name] == texts["none"] for name in names},
    }


def make_ways(model: Any, tokenizer: Any, cache_tokens: int) -> dict[str, Way]:
    from nwor_specpv.transformers import Generator

    first = Generator(model, tokenizer, "none", cache_tokens=cache_tokens)
    viewing = view_config("lossless", 1024)
    own = {
        "none": first,
        "ngram": Generator(drafter="ngram", cache_of=first),
        "eagle3": Generator(drafter="eagle3", cache_of=first),
        "lossless": Generator(drafter="eagle3", specpv=viewing, cache_of=first),
    }
    for generator in own.values():
        _ = generator.row_costs  # measured once on a machine

    def way(name: str) -> Way:
        return lambda prompts, tokens: own[name].generate(prompts, tokens, eos_token_id=-1)

    return {name: way(name) for name in WAYS}


def cache_size(batch: int, context: int, tokens: int) -> int:
    """Room for prompts that are kept, and for the ends that calls have and leave."""
    return batch * context + 3 * max(8, batch) * (tokens + _MORE_ROWS)


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


def judge(record: dict[str, Any]) -> int:
    """Prints the worst cell; 1 if it is below the goal."""
    shares = {
        (one["of_plain"][name], one["batch"], one["context"], one["kind"], name)
        for one in record["cells"]
        for name in one["of_plain"]
    }
    share, batch, context, kind, name = min(shares)
    print(f"worst: {share:.3f} of plain decoding ({name}, {batch} x {context} {kind}), goal {GOAL}")
    return 0 if share >= GOAL else 1


def main(argv: list[str]) -> int:
    parser = Parser(prog="generate_matrix.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, required=True, help="the record; it is gone on with")
    parser.add_argument("--batch", type=counts, default=[1, 4, 8], help="default: 1,4,8")
    parser.add_argument(
        "--context", type=counts, default=[100, 2048, 6144], help="default: 100,2048,6144"
    )
    parser.add_argument("--tokens", type=count, default=64, help="of each answer, default: 64")
    parser.add_argument("--rounds", type=count, default=3, help="default: 3")
    parser.add_argument("--threads", type=count, help="default: torch's")
    arguments = parser.parse_args(argv)
    import torch

    from nwor_specpv.transformers import load_model

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    setting = {
        **machine("cpu"),
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
    }
    record = read_record(arguments.json, setting)
    done = [{name: one[name] for name in ("batch", "context", "kind")} for one in record["cells"]]
    missing = [cell for cell in cells(arguments.batch, arguments.context) if cell not in done]
    size = cache_size(max(arguments.batch), max(arguments.context), arguments.tokens)
    model = tokenizer = None
    for kind, of_kind in itertools.groupby(missing, key=lambda cell: cell["kind"]):
        if model is None:
            model, tokenizer = load_model()
        ways = make_ways(model, tokenizer, size)
        for cell in of_kind:
            prompts = make_prompts(tokenizer, kind, cell["batch"], cell["context"])
            told = run_cell(ways, prompts, arguments.tokens, arguments.rounds)
            record["cells"].append(cell | told)
            write_whole(arguments.json, json.dumps(record, indent=1) + "\n")
            shares = ", ".join(f"{name} {share:.2f}" for name, share in told["of_plain"].items())
            print(f"{cell['batch']} x {cell['context']} {kind}: {shares}", flush=True)
    return judge(record)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NworError as error:
        print(f"generate_matrix.py: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
