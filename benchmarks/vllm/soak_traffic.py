"""The requests of soak.py: of every kind that a server gets, drawn at random from one seed.

* greedy, shared, stop, json, lora: from small pools, so that each request comes again and again,
  alone and in any company. Those of `shared` have a long beginning in common, `lora` names one of
  the adapters, `json` is bound to a schema, a pattern or a choice.
* sampled: with temperature, top-k, top-p and penalties; each is new.
* abort: the client closes its connection after some pieces of the answer.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Kinds and how often they come.
KINDS = {"greedy": 20, "sampled": 16, "stop": 12, "abort": 12, "shared": 16, "json": 10, "lora": 14}
STOPS = [",", " the", "\n"]
NAMES = ["oak", "birch", "lime"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": NAMES}, "age": {"type": "integer", "minimum": 1}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PATTERN = "(ab|ba){3,20}"
_POOL = 8  # different requests of a kind
_CHARACTERS = 4  # of a token, about
_HALF = 0.5  # of the requests that are left are sampled, where any are


@dataclass(frozen=True)
class Request:
    kind: str
    body: Mapping[str, Any]
    key: str = ""  # requests with one key get one text
    leave_after: int = 0  # pieces of the answer after which the client leaves; 0: it reads all


class Traffic:
    """Requests without end. Thread-safety: none."""

    def __init__(
        self,
        text: str,
        seed: int,
        *,
        prompt_tokens: int,
        answer_tokens: int,
        adapters: Sequence[str] = (),
        sampled: bool = True,
    ) -> None:
        """Without `sampled` all requests are greedy."""
        self._chance = random.Random(seed)
        self._text = text
        self._prompt_tokens, self._answer_tokens = prompt_tokens, answer_tokens
        self._adapters = adapters
        self._shared = self._passage(prompt_tokens)
        makers = {"greedy": self._greedy, "shared": self._sharing, "stop": self._stopping}
        makers |= {"json": self._bound} | ({"lora": self._adapted} if adapters else {})
        self._pools = {
            kind: [Request(kind, make(), f"{kind} {number}") for number in range(_POOL)]
            for kind, make in makers.items()
        }
        left_out = {"lora"} if not adapters else set()
        left_out |= {"sampled"} if not sampled else set()
        self.weights = {kind: n for kind, n in KINDS.items() if kind not in left_out}

    def __iter__(self) -> Traffic:
        return self

    def __next__(self) -> Request:
        (kind,) = self._chance.choices(list(self.weights), list(self.weights.values()))
        if kind in self._pools:
            return self._chance.choice(self._pools[kind])
        if kind == "sampled":
            return Request(kind, self._sampled())
        wants_sampling = "sampled" in self.weights and self._chance.random() < _HALF
        body = self._sampled() if wants_sampling else self._greedy()
        body |= {"max_tokens": self._answer_tokens, "ignore_eos": True}
        return Request(kind, body, leave_after=self._chance.randint(1, 12))

    def _length(self, most: int) -> int:
        """Short ones are as frequent as long ones, by their logarithm."""
        return round(math.exp(self._chance.uniform(math.log(4), math.log(most))))

    def _passage(self, tokens: int) -> str:
        start = self._chance.randrange(len(self._text) - _CHARACTERS * tokens)
        return self._text[start : start + _CHARACTERS * tokens]

    def _greedy(self) -> dict[str, Any]:
        prompt = self._passage(self._length(self._prompt_tokens))
        return {"prompt": prompt, "temperature": 0, "max_tokens": self._length(self._answer_tokens)}

    def _sharing(self) -> dict[str, Any]:
        kept = self._chance.randint(len(self._shared) // 2, len(self._shared))
        return self._greedy() | {"prompt": self._shared[:kept] + self._passage(8)}

    def _stopping(self) -> dict[str, Any]:
        return self._greedy() | {"stop": STOPS, "max_tokens": self._answer_tokens}

    def _bound(self) -> dict[str, Any]:
        kind = self._chance.choice([{"json": SCHEMA}, {"regex": PATTERN}, {"choice": NAMES}])
        return self._greedy() | {"structured_outputs": kind, "max_tokens": self._answer_tokens}

    def _adapted(self) -> dict[str, Any]:
        return self._greedy() | {"model": self._chance.choice(list(self._adapters))}

    def _sampled(self) -> dict[str, Any]:
        told = self._greedy() | {"temperature": self._chance.choice([0.5, 1.0])}
        more = [{}, {"top_k": 20}, {"top_p": 0.8}, {"frequency_penalty": 0.5}, {"seed": 7}]
        return told | self._chance.choice(more)


def arrivals(rate: float, seed: int) -> Any:
    """Moments of a Poisson process, in seconds."""
    chance = random.Random(seed)
    return itertools.accumulate(chance.expovariate(rate) for _ in itertools.count())


def fits(body: Mapping[str, Any], text: str) -> bool:
    """Whether a whole text is bound as its request asked."""
    asked = body.get("structured_outputs", {})
    if "regex" in asked:
        return re.fullmatch(asked["regex"], text) is not None
    if "choice" in asked:
        return text in asked["choice"]
    if "json" in asked:
        try:
            told = json.loads(text)
        except json.JSONDecodeError:
            return False
        return told.keys() == {"name", "age"} and told["name"] in NAMES and told["age"] >= 1
    return True
