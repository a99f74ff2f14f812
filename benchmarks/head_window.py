#!/usr/bin/env python3
"""How many drafts of the shipped EAGLE3 head are right, by how far back the head itself may look.

    python benchmarks/head_window.py --text BOOK.txt --json out.json

SmolLM2-135M in float32 on the CPU. It reads passages of a book and writes on greedily at several
contexts: the book, a new paragraph of it, and answers to two questions. From every place of these
continuations the head drafts a chain of four, once for each window: its one attention layer sees
that many of its latest entries, and the drafts before. What the target would accept of a chain is
what it has in common with the continuation. The target sees everything, whatever the window.

All windows start at the same places, so their differences to `all` are those of pairs. Standard
errors are those of passages: places of one passage are alike. Chains from many places are computed
at once here; some of them are drafted by the package's own drafter too and have to be the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nwor_specpv.bench.report import machine
from nwor_specpv.cli.parser import count, output_file
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.drafters.eagle3 import SHIPPED, Eagle3Drafter
from nwor_specpv.drafters.eagle3_head import Eagle3Head, rotate
from nwor_specpv.errors import NworError
from nwor_specpv.models import smollm2
from nwor_specpv.train.prompt_file import prompt_encoder
from nwor_specpv.train.prompts import Encode
from nwor_specpv.train.target import TrainingTarget

DRAFTS = 4
NEW_TOKENS = 72  # of a continuation, unless it ends before
STOP_TOKENS = (0, 2)
CHUNK = 512  # tokens that the target reads at once
CHECKED = 8  # chains of the first passage, by context, end and window
BEGINNING = (
    "<|im_start|>user\nThe name of the horse is Arkady, it is seven years old and it came from the "
    "village of Sosnovka. It belongs to the miller Yefim and pulls a green cart. Keep this in mind "
    "while you read.\n\n"
)
QUESTIONS = (
    "Describe in your own words what happens in this passage and who the people in it are.",
    "Repeat what was said about the horse at the very beginning, word for word.",
)
# After a context: nothing, a new paragraph, or a question.
ENDS = ("", "\n\n", *(f"\n\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS))

Window = int | None  # entries that the head sees; None: all


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    folder = smollm2("float32")
    head = Eagle3Head.load(SHIPPED).to(torch.float32)
    target = TrainingTarget(folder, head.shape.feature_layers)
    encode = prompt_encoder(folder)
    ends = [encode(end) for end in ENDS]
    passages = read_passages(Path(args.text), encode, args.passages, args.contexts[-1])
    measurement = Measurement(target, head, args.contexts, args.windows)
    began = time.monotonic()
    for number, passage in enumerate(passages):
        measurement.add(passage, ends, check=number == 0)
        found = describe(args, measurement)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
        told = f"passage {number + 1} of {len(passages)}, {time.monotonic() - began:.0f} s"
        print(f"{told}, {measurement.checked} chains checked\n{table(found)}", flush=True)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    windows, contexts = [256, 512, 1024, 2048, 4256, None], [2048, 4096, 6144]
    parser.add_argument("--text", required=True, help="a long text in English")
    parser.add_argument("--passages", type=count, default=4)
    parser.add_argument(
        "--windows",
        type=parse_window,
        nargs="+",
        default=windows,
        help="entries, or all; all is added",
    )
    parser.add_argument("--contexts", type=count, nargs="+", default=contexts)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--json", type=output_file, required=True, metavar="FILE")
    args = parser.parse_args(arguments)
    args.contexts = sorted(set(args.contexts))
    args.windows = [*sorted({size for size in args.windows if size}), None]
    return args


def parse_window(text: str) -> Window:
    return None if text == "all" else count(text)


def read_passages(path: Path, encode: Encode, number: int, tokens: int) -> list[list[int]]:
    """Beginnings of prompts, of `tokens` tokens each, from places all over the text."""
    text, beginning = path.read_text(encoding="utf-8"), encode(BEGINNING)
    room, passages = 8 * tokens, []  # characters: more than enough
    for index in range(number):
        begin = max(0, len(text) - room) * (2 * index + 1) // (2 * number)
        paragraph = text.find("\n\n", begin)
        begin = begin if paragraph < 0 else paragraph + 2
        passages.append((beginning + encode(text[begin : begin + room]))[:tokens])
    shortest = min(map(len, passages))
    if shortest < tokens:
        raise NworError(f"--text: got a passage of {shortest} tokens, expected {tokens}")
    return passages


# ---- the target ----


@dataclass
class Continuation:
    """A prompt and what the target wrote after it."""

    tokens: list[int]
    features: torch.Tensor  # [len(tokens) - 1, layers * hidden]
    prompt_tokens: int

    @property
    def starts(self) -> torch.Tensor:
        """Entries to draft from: the target's choice is there, and four more after it."""
        return torch.arange(self.prompt_tokens - 1, len(self.tokens) - 1 - DRAFTS)

    def accepted(self, drafts: torch.Tensor) -> int:
        """Drafts [starts, DRAFTS] that agree with what was written, and those before them too."""
        truth = torch.tensor(self.tokens).unfold(0, DRAFTS, 1)[self.starts + 2]
        return int((drafts == truth).int().cumprod(dim=1).sum())


class Reader:
    """Reads a passage, and writes on wherever it stands. What was written is read over."""

    def __init__(self, target: TrainingTarget, room: int) -> None:
        if room > target.context:
            raise NworError(
                f"--contexts: got {room} tokens with answers, expected {target.context}"
            )
        self._target, self._start = target, torch.zeros(1, dtype=torch.int64)
        target.allocate(1, room)

    def read(self, tokens: list[int], contexts: Sequence[int]) -> Iterator[torch.Tensor]:
        """The features of everything so far, at each context."""
        parts, at = [], 0
        for context in contexts:
            while at < context:
                end = min(at + CHUNK, context)
                parts.append(self._step(tokens[at:end], at)[0])
                at = end
            yield torch.cat(parts)

    def write(self, prompt: list[int], known: torch.Tensor) -> Continuation:
        """Greedily, after a prompt whose first rows were read and have the features `known`."""
        tokens, parts = list(prompt), [known[: len(prompt) - 1]]
        done = len(parts[0])
        for _ in range(NEW_TOKENS):
            features, chosen = self._step(tokens[done:], done)
            parts.append(features)
            done = len(tokens)
            tokens.append(chosen)
            if chosen in STOP_TOKENS:
                break
        return Continuation(tokens, torch.cat(parts), len(prompt))

    def _step(self, tokens: list[int], position: int) -> tuple[torch.Tensor, int]:
        features, normed = self._target.step(torch.tensor([tokens]), position, self._start)
        return features[0], int(self._target.logits(normed[0, -1]).argmax())


# ---- the head ----


@dataclass
class Entries:
    """What the head makes of a text; none of it depends on the window. T entries."""

    hidden: torch.Tensor  # [T, hidden]
    query: torch.Tensor  # [T, Hq, D], rotated
    keys: torch.Tensor  # [T, Hkv, D], rotated
    values: torch.Tensor  # [T, Hkv, D]


class ChainDrafter:
    """Chains of best guesses from many places of a text at once."""

    def __init__(self, head: Eagle3Head, embedding: torch.Tensor, room: int) -> None:
        self._head, self._embedding = head, embedding
        self._output = embedding[head.draft_to_target]
        self._cos, self._sin = (part[:, None] for part in head.rotation(room + DRAFTS))

    def entries(self, text: Continuation) -> Entries:
        hidden = self._head.fuse(text.features)
        places = torch.arange(len(hidden))
        return Entries(hidden, *self._project(torch.tensor(text.tokens[1:]), hidden, places))

    def draft(self, entries: Entries, starts: torch.Tensor, size: int) -> torch.Tensor:
        """[S, DRAFTS], from the entries `starts` [S], which see the latest `size` of them."""
        first, end = max(0, int(starts[0]) + 1 - size), int(starts[-1]) + 1
        keys, values = entries.keys[first:end], entries.values[first:end]
        behind = starts[:, None] - torch.arange(first, end)
        seen = (behind >= 0) & (behind < size)
        own = torch.eye(len(starts), dtype=torch.bool)  # drafts lie behind the text's entries
        hidden, query, drafts = entries.hidden[starts], entries.query[starts], []
        for step in range(1, DRAFTS + 1):
            hidden = self._head.finish(hidden, attend(query, keys, values, seen))
            scores = self._head.normalize(hidden) @ self._output.T
            drafts.append(self._head.draft_to_target[scores.argmax(dim=-1)])
            query, key, value = self._project(drafts[-1], hidden, starts + step)
            keys, values = torch.cat([keys, key]), torch.cat([values, value])
            seen = torch.cat([seen, own], dim=1)
        return torch.stack(drafts, dim=1)

    def _project(
        self, tokens: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self._head.project(self._embedding[tokens], hidden)
        cos, sin = self._cos[places], self._sin[places]
        return rotate(query, cos, sin), rotate(key, cos, sin), value


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """query [S, Hq, D], keys and values [T, Hkv, D], seen [S, T] -> [S, Hq * D]."""
    heads_first = (part.transpose(0, 1)[None] for part in (query, keys, values))
    attended = scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)


def package_chains(
    head: Eagle3Head, embedding: torch.Tensor, text: Continuation, size: int
) -> list[list[int]]:
    """The same, by the package's own drafter, one place after the other; the first ones."""
    shape = dataclasses.replace(head.shape, window=size)
    drafter = Eagle3Drafter(
        Eagle3Head(shape, head.weights, head.draft_to_target),
        embedding,
        dtype=torch.float32,
        draft_vocabulary=len(head.draft_to_target),
        own_tokens=0,
        min_probability=0.0,
    )
    drafter.begin(0, text.tokens[:1])
    chains, done = [], 0
    for start in text.starts[:CHECKED].tolist():
        drafter.observe(0, text.tokens[done + 1 : start + 2], text.features[done : start + 1])
        (tree,) = drafter.draft([0], TreeConfig(rows=1 + DRAFTS, depth=DRAFTS, top_k=1))
        chains.append(tree.tokens[1:])
        done = start + 1
    return chains


# ---- what is counted ----


class Measurement:
    """Sums of every context and window, passage by passage."""

    def __init__(
        self,
        target: TrainingTarget,
        head: Eagle3Head,
        contexts: Sequence[int],
        windows: Sequence[Window],
    ) -> None:
        self._target, self._head, self._contexts = target, head, contexts
        self.starts: dict[int, list[int]] = {context: [] for context in contexts}
        self.tokens: dict[tuple[int, Window], list[int]] = {
            (context, size): [] for context in contexts for size in windows
        }
        self.windows, self.checked = windows, 0

    @torch.no_grad()
    def add(self, passage: list[int], ends: Sequence[list[int]], check: bool) -> None:
        room = self._contexts[-1] + max(map(len, ends)) + NEW_TOKENS
        reader = Reader(self._target, room)
        drafter = ChainDrafter(self._head, self._target.embedding, room)
        known = reader.read(passage, self._contexts)
        for context, features in zip(self._contexts, known, strict=True):
            texts = [reader.write(passage[:context] + end, features) for end in ends]
            self._count(context, drafter, [text for text in texts if len(text.starts)], check)
            print(f"  {context} tokens: {self.starts[context][-1]} starts", flush=True)

    def _count(
        self, context: int, drafter: ChainDrafter, texts: list[Continuation], check: bool
    ) -> None:
        starts = sum(len(text.starts) for text in texts)
        self.starts[context].append(starts)
        sums = dict.fromkeys(self.windows, starts)  # the target's own token, at each
        for text in texts:
            entries = drafter.entries(text)
            for size in self.windows:
                drafts = drafter.draft(entries, text.starts, size or len(text.tokens))
                sums[size] += text.accepted(drafts)
                if check:
                    self._check(text, size, drafts)
        for size, tokens in sums.items():
            self.tokens[context, size].append(tokens)

    def _check(self, text: Continuation, size: Window, drafts: torch.Tensor) -> None:
        most = size or len(text.tokens)
        expected = package_chains(self._head, self._target.embedding, text, most)
        got = drafts[:CHECKED].tolist()
        if got != expected:
            raise NworError(f"window {most}: got chains {got}, expected the drafter's {expected}")
        self.checked += len(got)


def mean_and_error(sums: Sequence[int], counts: Sequence[int]) -> tuple[float, float | None]:
    """Of one sum and count a passage; a single passage says nothing of its error."""
    mean, number = sum(sums) / sum(counts), len(sums)
    if number < 2:
        return mean, None
    squares = sum((one - mean * size) ** 2 for one, size in zip(sums, counts, strict=True))
    return mean, math.sqrt(squares * number / (number - 1)) / sum(counts)


def cell(measurement: Measurement, context: int, size: Window) -> dict[str, Any]:
    starts, tokens = measurement.starts[context], measurement.tokens[context, size]
    every = measurement.tokens[context, None]
    gains = [mine - theirs for mine, theirs in zip(tokens, every, strict=True)]
    found: dict[str, Any] = {"context": context, "window": size or "all", "starts": sum(starts)}
    for name, sums in (("accepted_length", tokens), ("difference_to_all", gains)):
        mean, error = mean_and_error(sums, starts)
        found[name] = round(mean, 4)
        found[f"{name}_error"] = None if error is None else round(error, 4)
    return found


def describe(args: argparse.Namespace, measurement: Measurement) -> dict[str, Any]:
    return {
        **machine("cpu"),
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "weights": SHIPPED.name,
        "text": Path(args.text).name,
        "passages": len(measurement.starts[args.contexts[0]]),
        "drafts": DRAFTS,
        "new_tokens": NEW_TOKENS,
        "checked_chains": measurement.checked,
        "contexts": args.contexts,
        "windows": [size or "all" for size in args.windows],
        "cells": [cell(measurement, *place) for place in measurement.tokens],
    }


def table(found: dict[str, Any]) -> str:
    lines = ["context  window  starts  accepted length  beside all"]
    for row in found["cells"]:
        lines.append(
            f"{row['context']:7}  {row['window']:>6}  {row['starts']:6}"
            f"  {row['accepted_length']:.3f}{told_error(row['accepted_length_error'])}"
            f"  {row['difference_to_all']:+.3f}{told_error(row['difference_to_all_error'])}"
        )
    return "\n".join(lines)


def told_error(error: float | None) -> str:
    return "" if error is None else f" +- {error:.3f}"


if __name__ == "__main__":
    sys.exit(main())
