"""Runs a prompt in several modes and records what each did, for tables and pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nwor_specpv.cli.generate import view_config
from nwor_specpv.transformers import Generation, Generator


@dataclass(frozen=True)
class Mode:
    name: str
    drafter: str = "none"
    specpv: str = "off"
    view_tokens: int = 1024


def record(
    mode: Mode, generation: Generation, tokenizer: Any, reference: list[int] | None
) -> dict[str, Any]:
    """One run as plain numbers; `reference`: what plain decoding said."""
    ids = generation.token_ids
    return {
        "name": mode.name,
        "drafter": mode.drafter,
        "specpv": mode.specpv,
        "same_tokens": None if reference is None else ids == reference,
        "coverage": generation.stats.coverage,
        "pieces": pieces(tokenizer, ids, generation.depths),
        "token_ids": ids,
        **generation.stats.as_dict(),
    }


def sweep(
    first: Generator, modes: Iterable[Mode], prompt: list[int], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Every mode over one prompt, with the model and cache of `first`. The last is the reference.

    The prompt runs once: later modes find it in the cache. A mode with a draft head goes first,
    since it wants to see the prompt's features.
    """
    records = []
    for mode in modes:
        generator = Generator(
            drafter=mode.drafter,
            specpv=view_config(mode.specpv, mode.view_tokens),
            cache_of=first,
        )
        generation = generator.generate(prompt, max_new_tokens)
        records.append(record(mode, generation, first.tokenizer, None))
    reference = records[-1]["token_ids"]
    for one in records[:-1]:
        one["same_tokens"] = one["token_ids"] == reference
    return records


def pieces(tokenizer: Any, ids: list[int], depths: list[int]) -> list[tuple[str, int]]:
    """The text in the pieces its tokens made, each with the depth of the draft it was."""
    found, before = [], ""
    for count, depth in enumerate(depths, 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and count < len(ids):
            continue  # a character of several tokens
        if len(text) > len(before):
            found.append((text[len(before) :], depth))
        before = text
    return found
