"""Changes of logits by the tokens before them: penalties, and processors of the caller's.

Each row of a tree is changed by its own path, so tokens are those of decoding one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nwor_specpv import NworError
from nwor_specpv.transformers.request import Part
from nwor_specpv.transformers.round import Round

# Ids [n, length] of n rows and their logits [n, V] -> logits [n, V], as in transformers.
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Processors:
    """What is done to logits, in this order: repetition, presence, the caller's own."""

    def __init__(
        self,
        repetition_penalty: Any = 1.0,
        presence_penalty: Any = 0.0,
        logits_processor: Iterable[Processor] | Processor | None = None,
    ) -> None:
        repetition = _number("repetition_penalty", repetition_penalty)
        if repetition <= 0:
            raise NworError(f"repetition_penalty: got {repetition_penalty!r}, expected above 0")
        self._presence = _number("presence_penalty", presence_penalty)
        self._repetition = None
        if repetition != 1:
            self._repetition = RepetitionPenaltyLogitsProcessor(penalty=repetition)
        self._own = _callables(logits_processor)

    def __bool__(self) -> bool:
        return bool(self._repetition or self._presence or self._own)

    def run(self, round_: Round) -> torch.Tensor:
        """The changed logits of a round's rows, in float32."""
        logits = round_.logits.to(torch.float32, copy=True)
        for part, span in zip(round_.parts, round_.logit_spans(), strict=True):
            for rows, contexts in _by_length(part, *span):
                ids = torch.tensor(contexts, device=logits.device)
                logits[rows] = self._process(ids, logits[rows], part.request.prompt_len)
        return logits

    def _process(self, ids: torch.Tensor, logits: torch.Tensor, prompt: int) -> torch.Tensor:
        if self._repetition is not None:
            logits = self._repetition(ids, logits)
        if self._presence:
            seen = torch.zeros_like(logits).scatter_(1, ids[:, prompt:], 1.0)
            logits = logits - self._presence * seen
        for processor in self._own:
            changed = processor(ids, logits)
            if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
                got = list(changed.shape) if isinstance(changed, torch.Tensor) else type(changed)
                raise NworError(
                    f"logits_processor: got {got} from {processor!r}, expected logits of "
                    f"{list(logits.shape)}"
                )
            logits = changed
        return logits


def _by_length(
    part: Part, first: int, root: int, end: int
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Rows of a part with as many tokens before them, and these tokens, the row's own included."""
    tokens, before = part.request.tokens, part.prefix_len + len(part.fed)
    for row in range(first, root):
        yield [row], [tokens[: before - (root - row) + 1]]
    paths: list[list[int]] = []
    depths: dict[int, list[int]] = {}
    for row in range(end - root):
        parent = part.parents[row]
        path = ([] if parent < 0 else paths[parent]) + [part.tokens[row]]
        paths.append(path)
        depths.setdefault(len(path), []).append(row)
    for rows in depths.values():
        yield [root + row for row in rows], [tokens[:before] + paths[row] for row in rows]


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise NworError(f"{name}: got {value!r}, expected a finite number")
    return float(value)


def _callables(given: Any) -> Sequence[Processor]:
    # transformers' LogitsProcessorList is a list that can be called.
    several = isinstance(given, Iterable)
    own = () if given is None else tuple(given) if several else (given,)
    wrong = next((one for one in own if not callable(one)), None)
    if wrong is not None:
        raise NworError(
            f"logits_processor: got {wrong!r}, expected functions of ids [n, length] and logits "
            "[n, vocabulary]"
        )
    return own
