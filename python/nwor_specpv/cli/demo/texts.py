"""Prompts of the demo and the benchmarks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

BOOK = Path(__file__).with_name("war_and_peace.txt")
CHAT = (
    "Explain how a refrigerator keeps food cold, step by step.",
    "Write a short letter to a friend about a walk in the mountains.",
    "What are the main differences between a frog and a toad?",
    "Give me a simple recipe for tomato soup with bread.",
)
STORY = (
    "Once upon a time there was an old lighthouse keeper who lived alone on a small island. One "
    "evening, when the fog was so thick that he could not see the stairs,",
    "The train stopped between two stations, and nobody knew why. Maria looked up from her book. "
    "The man opposite her",
)
CODE = (
    'def read_settings(path):\n    """Reads a file of lines \'name = value\' into a dict."""\n',
)
QUESTION = "\n\nRead the log above. Write a summary of what happened in it, keeper by keeper."

_NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Farid", "Greta", "Hugo")
_THINGS = (
    "the north lamp",
    "a cracked window",
    "the fog horn",
    "the weather glass",
    "the old boat",
)
_DEEDS = ("cleaned", "repaired", "painted", "inspected", "replaced", "tested")
_SIGHTS = ("two fishing boats", "a grey whale", "a storm in the west", "a white sail", "nothing")


def long_prompt(tokenizer: Any, num_tokens: int, seed: int = 1) -> list[int]:
    """A lighthouse's log of `num_tokens` tokens, made up from a seed, and a question about it."""
    rng = random.Random(seed)
    head = tokenizer("Log of the lighthouse.\n").input_ids
    end = tokenizer(QUESTION + "\n\nSummary:").input_ids
    body: list[int] = []
    day = 0
    while len(head) + len(body) + len(end) < num_tokens:
        day += 1
        line = (
            f"Day {day}. {rng.choice(_NAMES)} {rng.choice(_DEEDS)} {rng.choice(_THINGS)} at "
            f"{rng.randrange(5, 22)} o'clock and saw {rng.choice(_SIGHTS)}. "
            f"The oil stood at {rng.randrange(10, 99)} litres.\n"
        )
        body += tokenizer(line).input_ids
    return head + body[: num_tokens - len(head) - len(end)] + end


def book_prompt(tokenizer: Any, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of War and Peace; a text that is too short begins again."""
    body: list[int] = []
    for line in itertools.cycle(BOOK.read_text(encoding="utf-8").splitlines(keepends=True)):
        if len(body) >= num_tokens:
            break
        body += tokenizer(line).input_ids
    return body[:num_tokens]
