"""Runs a prompt in several modes and records each run, for tables and pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nwor_specpv.cli.generate import view_config
from nwor_specpv.transformers import Generation, Generator
from nwor_specpv.transformers.views.log import ViewLog


@dataclass(frozen=True)
class Mode:
    name: str
    drafter: str = "none"
    specpv: str = "off"
    view_tokens: int = 1024
    partial_steps: int = 0  # between full steps at most; 0: as many as the tail has room for
    pace: bool = True  # False: lossless verification uses its views whether they pay or not


def record(
    mode: Mode, generation: Generation, tokenizer: Any, views: list[dict[str, Any]]
) -> dict[str, Any]:
    """One run as plain numbers. `views`: what a ViewLog has recorded."""
    ids = generation.token_ids
    return {
        "name": mode.name,
        "drafter": mode.drafter,
        "specpv": mode.specpv,
        "same_tokens": None,
        "agreed_tokens": None,
        "coverage": generation.stats.coverage,
        "views": views,
        "pieces": pieces(tokenizer, ids, generation.depths),
        "token_ids": ids,
        **generation.stats.as_dict(),
    }


def compare(one: dict[str, Any], reference: dict[str, Any]) -> None:
    """Says of a record whether its tokens are those of another, and up to which token."""
    pairs = zip(one["token_ids"], reference["token_ids"], strict=False)
    one["same_tokens"] = one["token_ids"] == reference["token_ids"]
    one["agreed_tokens"] = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    )


def sweep(
    first: Generator,
    modes: Iterable[Mode],
    prompt: list[int],
    max_new_tokens: int,
    warm_up: int = 0,
) -> list[dict[str, Any]]:
    """Runs every mode over one prompt, with the model and cache of `first`.

    Tokens are compared with those of the last mode. The prompt runs once: later modes find it in
    the cache. A mode with a draft head goes first, since the head reads the prompt's features.
    `warm_up`: every mode first generates that many tokens, which are not recorded.
    """
    records = []
    for mode in modes:
        generator = Generator(
            drafter=mode.drafter,
            specpv=view_config(mode.specpv, mode.view_tokens, partial_steps=mode.partial_steps),
            pace=mode.pace,
            cache_of=first,
        )
        if warm_up:
            generator.generate(prompt, warm_up)
        log = ViewLog()
        generation = generator.generate(prompt, max_new_tokens, view_log=log)
        records.append(record(mode, generation, first.tokenizer, log.views))
    for one in records[:-1]:
        compare(one, records[-1])
    return records


def pieces(tokenizer: Any, ids: list[int], depths: list[int]) -> list[tuple[str, int]]:
    """The text, cut at its tokens, each piece with the depth of its accepted draft."""
    found, before = [], ""
    for count, depth in enumerate(depths, 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and count < len(ids):
            continue  # a character of several tokens
        if len(text) > len(before):
            found.append((text[len(before) :], depth))
        before = text
    return found
