"""What serving.py asks of a server: how many requests of which lengths, and when they come."""

from __future__ import annotations

import bisect
import functools
import json
import math
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = Path(__file__).with_name("lengths.json")
ALL = "all"  # at once: the most that a server can do


@dataclass(frozen=True)
class Load:
    """`8c`: eight clients, each asks again when it is answered. `2.5`: so many requests a second,
    at random moments (Poisson). `50%`: so many of what stock vLLM served of `all`, which come at
    once."""

    name: str

    @property
    def clients(self) -> int:
        """0: requests come whether or not others are answered."""
        return int(self.name[:-1]) if self.name.endswith("c") else 0

    @property
    def share(self) -> float:
        """Of stock vLLM's most requests a second; 0: the load does not depend on it."""
        return float(self.name[:-1]) / 100 if self.name.endswith("%") else 0.0

    def rate(self, most: float) -> float:
        """Requests a second. `most`: what stock vLLM served of `all`."""
        if self.name == ALL or self.clients:
            return math.inf
        return self.share * most if self.share else float(self.name)

    @staticmethod
    def parse(name: str) -> Load:
        load = Load(name)
        if load.rate(1.0) <= 0:
            raise ValueError(f"{name}: expected more than 0")
        return load


@functools.cache
def tables() -> dict[str, Any]:
    return json.loads(LENGTHS.read_text(encoding="utf-8"))


def length_at(table: str, what: str, share: float) -> int:
    """The length that `share` of all requests do not exceed."""
    told = tables()
    quantiles, lengths = told["quantiles"], told["tables"][table][what]
    above = min(max(1, bisect.bisect_left(quantiles, share)), len(quantiles) - 1)
    low, high = quantiles[above - 1], quantiles[above]
    begin, end = (math.log(lengths[above - 1]), math.log(lengths[above]))
    return round(math.exp(begin + (share - low) / (high - low) * (end - begin)))


def longest(table: str) -> int:
    """Tokens of prompt and answer, of the longest request of a table."""
    told = tables()["tables"][table]
    return told["prompt"][-1] + told["answer"][-1]


@dataclass(frozen=True)
class Sizes:
    prompt: int
    answer: int


def draw(table: str, count: int, seed: int) -> list[Sizes]:
    """Lengths of so many requests. Each share of the table comes equally often, in random order:
    a run of few requests has long ones, too."""
    chance = random.Random(seed)

    def lengths(what: str) -> list[int]:
        shares = [(index + chance.random()) / count for index in range(count)]
        chance.shuffle(shares)
        return [length_at(table, what, share) for share in shares]

    return [Sizes(*both) for both in zip(lengths("prompt"), lengths("answer"), strict=True)]


def moments(count: int, rate: float, seed: int) -> list[float]:
    """When requests come, in seconds."""
    chance, found, now = random.Random(seed), [], 0.0
    for _ in range(count):
        found.append(now)
        now += 0.0 if rate == math.inf else chance.expovariate(rate)
    return found


def seed_of(load: Load, turn: int) -> int:
    """The same on all sides, another one for each load and turn: no prompt comes twice."""
    return zlib.crc32(f"{load.name} {turn}".encode())
