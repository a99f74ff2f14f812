"""Measures tokens per step of a drafter's trees on texts that the target wrote greedily.

    python -m nwor_specpv.train.acceptance --json FILE

Texts: the held-out prompts (chat, story, code), and answers to questions that the target invents
with a seed that training did not use. The drafter is the one that hosts use. Every text is decoded
step by step as in a host; the target's choices are known from the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nwor_specpv._files import write_whole
from nwor_specpv.cli.parser import count, output_file, require_device
from nwor_specpv.drafters import Drafter, TreeConfig
from nwor_specpv.drafters.eagle3 import SHIPPED, Eagle3Drafter
from nwor_specpv.drafters.eagle3_head import Eagle3Head
from nwor_specpv.drafters.ngram import NgramDrafter
from nwor_specpv.errors import NworError

from . import prompts
from .chat_format import read_chat_format
from .corpus import Corpus, CorpusWriter, WritingStyle
from .measure import summary
from .prompt_file import prompt_encoder, stop_tokens
from .target import TrainingTarget
from .unroll import make_batch, ranks

INVENTED = "chat, invented"
TREES = {
    "chain of 4": TreeConfig(rows=5, depth=4, top_k=1),
    "8 rows": TreeConfig(rows=8, depth=4, top_k=3),
    "16 rows": TreeConfig(rows=16, depth=6, top_k=4),
    "32 rows": TreeConfig(rows=32, depth=8, top_k=6),
}
_CPU_TREES = ("8 rows", "32 rows")
# Training uses other seeds, which give other openings and other questions.
_SEED = 20_000


def write_texts(
    target: TrainingTarget,
    openings: Sequence[prompts.Opening],
    answer_tokens: int,
    length: int,
    stops: Sequence[int] = WritingStyle.stop_tokens,
) -> Corpus:
    """Writes a row for each opening: the opening, invented tokens, and a greedy answer."""
    corpus = Corpus.empty(len(openings), length, target)
    limit = (answer_tokens, answer_tokens)
    style = WritingStyle(greedy_share=1.0, answer=limit, stop_tokens=tuple(stops))
    CorpusWriter(target, openings, style).write(corpus, 0, len(openings))
    return corpus


def shorten(corpus: Corpus, answer_tokens: int) -> Corpus:
    """The same texts, with weight only on the first tokens of the answers."""
    answer = (corpus.weight >= 1) & (corpus.start == 0)
    beyond = answer & (answer.cumsum(dim=1) > answer_tokens)
    return dataclasses.replace(corpus, weight=corpus.weight.masked_fill(beyond, 0.0))


@dataclass
class Tally:
    """Sums over the steps of a text, as if its answer ended after `limit` tokens."""

    limit: int | None = None
    steps: int = 0
    tokens: int = 0  # emitted, the target's own included
    rows: int = 0  # verified, roots included

    def add(self, done: int, most: int, accepted: int, rows: int) -> None:
        """Adds a step after `done` of `most` tokens, with `accepted` drafts of a tree of `rows`."""
        left = (most if self.limit is None else min(most, self.limit - 1)) - done
        if left > 0:
            self.steps += 1
            self.tokens += min(accepted + 1, left)
            self.rows += rows


def report(tallies: Sequence[Tally]) -> dict[str, float]:
    """Tokens and rows per step with the standard error of the tokens, from one tally a text."""
    steps = max(1, sum(tally.steps for tally in tallies))
    tokens = sum(tally.tokens for tally in tallies) / steps
    # The texts are the sample: they differ more than the steps of one text.
    squares = sum((tally.tokens - tokens * tally.steps) ** 2 for tally in tallies)
    texts = len(tallies)
    error = math.sqrt(squares * texts / max(1, texts - 1)) / steps
    rows = sum(tally.rows for tally in tallies) / steps
    return {"tokens": round(tokens, 3), "error": round(error, 3), "rows": round(rows, 2)}


def walk(
    drafter: Drafter, corpus: Corpus, row: int, tree: TreeConfig, hidden: int, *tallies: Tally
) -> None:
    """Decodes the row's first text step by step, once for all tallies."""
    tokens = corpus.tokens[row].tolist()
    features = corpus.features[row, :, :-hidden]
    counts = (corpus.weight[row] >= 1) & (corpus.start[row] == 0)
    places = counts.nonzero().flatten().tolist()
    if not places:
        return
    at, last = places[0], places[-1]  # rows whose next token belongs to the answer
    drafter.begin(row, tokens[: at + 1])
    drafter.observe(row, tokens[1 : at + 2], features[: at + 1])
    while at + 1 <= last:
        (drafted,) = drafter.draft([row], tree)
        gain = min(_accepted(drafted.tokens, drafted.parents, tokens[at + 2 :]), last - at)
        for tally in tallies:
            tally.add(at - places[0], last - places[0], gain, len(drafted))
        end = at + 1 + gain + 1
        if end + 1 > len(tokens):
            break
        drafter.observe(row, tokens[at + 2 : end + 1], features[at + 1 : end])
        at += gain + 1
    drafter.end(row)


def _accepted(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> int:
    row = 0
    for depth, token in enumerate(truth):
        below = [
            child
            for child in range(row + 1, len(tokens))
            if parents[child] == row and tokens[child] == token
        ]
        if not below:
            return depth
        row = below[0]
    return len(truth)


def measure(
    drafter: Drafter,
    trees: Sequence[str],
    texts: dict[str, Corpus],
    limits: Sequence[int],
    hidden: int,
    say: Callable[[str], None],
) -> dict[int, dict[str, dict[str, dict[str, float]]]]:
    """Tokens (with their standard error) and rows per step, by limit, tree and kind of text."""
    found: dict[int, dict[str, dict[str, dict[str, float]]]] = {limit: {} for limit in limits}
    for name in trees:
        for kind, corpus in texts.items():
            rows = range(corpus.tokens.shape[0])
            tallies = {limit: [Tally(limit) for _ in rows] for limit in limits}
            for row in rows:
                mine = [tallies[limit][row] for limit in limits]
                walk(drafter, corpus, row, TREES[name], hidden, *mine)
            for limit in limits:
                found[limit].setdefault(name, {})[kind] = report(tallies[limit])
            say(f"{name}, {kind}: { {limit: found[limit][name][kind] for limit in limits} }")
    return found


def by_depth(target: TrainingTarget, head: Eagle3Head, corpus: Corpus) -> list[float]:
    """How often the first guess is the target's choice, at depths 1 to 6."""
    kept = head.draft_to_target.to(target.device)
    to_draft = torch.full((target.vocabulary,), -1, device=target.device)
    to_draft[kept] = torch.arange(len(kept), device=target.device)
    output = target.output[kept]
    batch = make_batch(corpus, head, target.embedding, to_draft, output)
    (found,) = summary(ranks(head, batch, output, 6), corpus).values()
    return found["top1_by_depth"]


def require_same(head: Eagle3Head, target: TrainingTarget, path: Path) -> None:
    """Raises unless the head fits the target."""
    shape, layers = head.shape, range(target.num_layers)
    for name, right, expected in (
        ("hidden", shape.hidden == target.hidden, target.hidden),
        ("target_vocabulary", shape.target_vocabulary == target.vocabulary, target.vocabulary),
        ("feature_layers", set(shape.feature_layers) <= set(layers), f"0 to {layers[-1]}"),
    ):
        if not right:
            got = getattr(shape, name)
            raise NworError(f"{path}: got a head of {name} {got}, expected {expected}")


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(arguments)
    except (NworError, OSError) as error:
        print(f"train.acceptance: {error}", file=sys.stderr)
        return 2


def run(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nwor_specpv.train.acceptance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--weights", type=Path, default=SHIPPED, help="default: the shipped head")
    parser.add_argument("--target", type=Path, help="folder, default: SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--invented", type=count, default=32, help="questions the target invents")
    parser.add_argument("--prompts", type=count, default=24, help="held-out prompts of a kind")
    parser.add_argument(
        "--answer-tokens",
        type=count,
        nargs="+",
        default=[96, 200],
        help="2 or more, since the first is the prompt's; default: 96 200",
    )
    parser.add_argument("--json", type=output_file, help="also writes the figures to this file")
    options = parser.parse_args(arguments)
    if min(options.answer_tokens) < 2:
        raise NworError(f"--answer-tokens: got {min(options.answer_tokens)}, expected 2 or more")

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    from nwor_specpv.models import smollm2

    head = Eagle3Head.load(options.weights)
    require_device(options.device)
    folder = options.target or smollm2("float32")
    target = TrainingTarget(folder, head.shape.feature_layers, options.device)
    require_same(head, target, options.weights)
    encode, chat = prompt_encoder(folder), read_chat_format(folder)
    stops = stop_tokens(folder, encode, chat)
    torch.manual_seed(_SEED)
    openings = prompts.openings(encode, 4 * options.invented, seed=_SEED, chat=chat)
    parts = {INVENTED: [o for o in openings if o.kind == "chat"][: options.invented]}
    for opening in prompts.held_out(encode, chat):
        parts.setdefault(opening.kind, []).append(opening)
    limits = options.answer_tokens
    written = {}
    for kind, part in parts.items():
        part = part[: options.prompts] if kind != INVENTED else part
        longest = max(len(o.tokens) + o.invented[1] + len(o.answer) + 1 for o in part)
        written[kind] = write_texts(target, part, max(limits), longest + max(limits), stops)
        say(f"{kind}: {len(part)} texts written")
    working = head.to(torch.float32, target.device)
    every = {"draft_vocabulary": len(head.draft_to_target), "min_probability": 0.0}
    whole = Eagle3Drafter(head, target.embedding, target.output, **every)
    default = Eagle3Drafter(head, target.embedding, target.output)
    found: dict[str, Any] = {
        "weights": options.weights.name,
        "target": "SmolLM2-135M-Instruct" if options.target is None else folder.resolve().name,
        "texts": {kind: corpus.tokens.shape[0] for kind, corpus in written.items()},
        "trees": {name: vars(tree) for name, tree in TREES.items()},
    }
    measured = {
        "eagle3": measure(whole, list(TREES), written, limits, target.hidden, say),
        "eagle3 as on the CPU": measure(default, _CPU_TREES, written, limits, target.hidden, say),
        "ngram": measure(NgramDrafter(), _CPU_TREES, written, limits, target.hidden, say),
    }
    for limit in limits:
        texts = {kind: shorten(corpus, limit) for kind, corpus in written.items()}
        found[f"answers of {limit} tokens"] = {
            "top1_by_depth": {k: by_depth(target, working, c) for k, c in texts.items()},
            **{name: by_limit[limit] for name, by_limit in measured.items()},
        }
    report_figures(found, options.json)
    return 0


def report_figures(found: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(found, indent=1)
    print(text, flush=True)  # first: the file may fail
    if path is not None:
        write_whole(path, text + "\n")


if __name__ == "__main__":
    sys.exit(main())
