"""Texts that the target writes itself, with the features of every token.

Each row holds one text after another. All rows advance by one token a step; where a text ends, the
next begins. The device decides what happens to a row, so that no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .prompts import KINDS, Opening
from .target import TrainingTarget

MOST_LENGTH = 32767  # of a row: positions are kept in 16 bits
_INVENT, _ANSWER, _OVER = 0, 1, 2
# Tokens with less than exp(-4) of the best token's probability are not drawn.
_CUT = 4.0


@dataclass
class Corpus:
    """N rows of L tokens. `features`: outputs of the fused layers, then the last, normalised."""

    tokens: torch.Tensor  # [N, L] int32
    best: torch.Tensor  # [N, L] int32: the target's own choice for the next token
    start: torch.Tensor  # [N, L] int16: where the token's text begins
    weight: torch.Tensor  # [N, L] bfloat16: weight of the next token
    kind: torch.Tensor  # [N, L] int8: index into KINDS
    features: torch.Tensor  # [N, L, (layers + 1) * hidden]

    @classmethod
    def empty(cls, rows: int, length: int, target: TrainingTarget) -> Corpus:
        def make(dtype: torch.dtype, *more: int) -> torch.Tensor:
            return torch.zeros((rows, length, *more), dtype=dtype, device=target.device)

        width = (len(target.feature_layers) + 1) * target.hidden
        return cls(
            make(torch.int32),
            make(torch.int32),
            make(torch.int16),
            make(torch.bfloat16),
            make(torch.int8),
            make(target.dtype, width),
        )

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    def rows(self, index: torch.Tensor) -> Corpus:
        return Corpus(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class WritingStyle:
    """How texts are continued and weighted."""

    greedy_share: float = 0.7  # of answers; the others are sampled
    temperature: float = 0.7  # of those
    answer: tuple[int, int] = (96, 280)  # range of the limit on an answer's length
    invented_weight: float = 0.25
    stop_tokens: tuple[int, ...] = (0, 2)  # <|endoftext|>, <|im_end|>


class CorpusWriter:
    """Lets the target write rows of a corpus."""

    def __init__(
        self, target: TrainingTarget, openings: Sequence[Opening], style: WritingStyle
    ) -> None:
        self._target, self._style = target, style
        device = target.device
        # Every list of given tokens is a line of one table: openings, then the tokens between
        # question and answer, then the same with the end marker, for questions without one.
        between = sorted({tuple(opening.answer) for opening in openings})
        end = style.stop_tokens[-1]
        lines = [list(opening.tokens) for opening in openings]
        lines += [list(line) for line in between]
        lines += [[end, *line] if line else [] for line in between]
        width = max(1, *map(len, lines))
        table = torch.zeros(len(lines), width, dtype=torch.int64)
        for row, line in zip(table, lines, strict=True):
            row[: len(line)] = torch.tensor(line, dtype=torch.int64)
        after = [len(openings) + between.index(tuple(opening.answer)) for opening in openings]
        self._table = table.to(device)
        self._sizes = torch.tensor([len(line) for line in lines], device=device)
        self._after = torch.tensor(after, device=device)
        self._num_between = len(between)
        self._kinds = torch.tensor([KINDS.index(o.kind) for o in openings], device=device)
        self._invented = torch.tensor([o.invented for o in openings], device=device)
        self._chats = self._sizes[self._after] > 0
        self._num_openings = len(openings)
        self._stops = torch.tensor(style.stop_tokens, device=device)

    @torch.no_grad()
    def write(self, corpus: Corpus, first: int, count: int) -> None:
        """Fills rows first .. first + count.

        With as many rows as openings each row begins with its own, otherwise with a random one.
        """
        target, device = self._target, self._target.device
        length = corpus.tokens.shape[1]
        target.allocate(count, length)
        rows = slice(first, first + count)
        everything = torch.arange(count, device=device) if count == self._num_openings else None
        state = self._begin(count, everything)
        start = torch.zeros(count, dtype=torch.int64, device=device)
        tokens = self._table[state["opening"], 0]
        for position in range(length):
            features, normed = target.step(tokens[:, None], position, start)
            logits = target.logits(normed[:, 0])
            corpus.tokens[rows, position] = tokens.int()
            corpus.start[rows, position] = start.short()
            corpus.kind[rows, position] = self._kinds[state["opening"]].to(torch.int8)
            corpus.features[rows, position] = torch.cat([features, normed], dim=-1)[:, 0]
            best, drawn = _draw(logits, state["temperature"])
            corpus.best[rows, position] = best.int()
            tokens, weight, over = self._advance(state, drawn)
            corpus.weight[rows, position] = weight.to(corpus.weight.dtype)
            fresh = self._begin(count, None)
            for name, value in fresh.items():
                state[name] = torch.where(over, value, state[name])
            tokens = torch.where(over, self._table[state["opening"], 0], tokens)
            start = start.masked_fill(over, position + 1)

    def _begin(self, count: int, opening: torch.Tensor | None) -> dict[str, torch.Tensor]:
        device = self._target.device
        if opening is None:
            opening = torch.randint(self._num_openings, (count,), device=device)
        low, high = self._invented[opening].unbind(-1)
        limit = low + (torch.rand(count, device=device) * (high - low + 1)).long()
        answers = high == 0
        # masked_fill for scalars: as arguments of `where` they would make the host wait.
        heat = torch.ones(count, device=device)
        return {
            "opening": opening,
            "line": opening,
            "given": torch.ones(count, dtype=torch.int64, device=device),
            "phase": answers.long(),  # _ANSWER or _INVENT
            "written": torch.zeros(count, dtype=torch.int64, device=device),
            "limit": torch.where(answers, self._answer_limit(count), limit),
            "temperature": torch.where(answers, self._answer_temperature(count), heat),
        }

    def _answer_limit(self, count: int) -> torch.Tensor:
        low, high = self._style.answer
        return torch.randint(low, high + 1, (count,), device=self._target.device)

    def _answer_temperature(self, count: int) -> torch.Tensor:
        draw = torch.rand(count, device=self._target.device)
        return (draw >= self._style.greedy_share) * self._style.temperature

    def _advance(
        self, state: dict[str, torch.Tensor], drawn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the next tokens, their weights, and which rows' texts are over."""
        count = drawn.shape[0]
        over = state["phase"] == _OVER  # its last token has just been run
        given = (state["given"] < self._sizes[state["line"]]) & ~over
        place = state["given"].clamp(max=self._table.shape[1] - 1)
        tokens = torch.where(given, self._table[state["line"], place], drawn)
        answering = state["phase"] == _ANSWER
        low = self._style.invented_weight
        weight = (answering * (1.0 - low) + low).masked_fill(given | over, 0.0)
        own = ~given & ~over
        state["given"] = state["given"] + given
        state["written"] = state["written"] + own
        stopped = own & (tokens[:, None] == self._stops).any(-1)
        full = own & (state["written"] >= state["limit"])
        chat = self._chats[state["opening"]]
        asked = (stopped | full) & (state["phase"] == _INVENT)
        finished = ((stopped | full) & answering) | (asked & stopped & ~chat)
        after = self._after[state["opening"]]
        after = torch.where(stopped, after, after + self._num_between)
        state["line"] = torch.where(asked, after, state["line"])
        state["given"] = state["given"].masked_fill(asked, 0)
        state["written"] = state["written"].masked_fill(asked, 0)
        state["limit"] = torch.where(asked, self._answer_limit(count), state["limit"])
        temperature = self._answer_temperature(count)
        state["temperature"] = torch.where(asked, temperature, state["temperature"])
        phase = state["phase"].masked_fill(asked, _ANSWER)
        state["phase"] = phase.masked_fill(finished, _OVER)
        return tokens, weight, over


def _draw(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the best tokens, and tokens sampled at each row's temperature (0: the best)."""
    top, best = logits.max(dim=-1)
    heat = temperature[:, None]
    noise = torch.empty_like(logits).exponential_()
    if not noise.is_cuda:
        noise.clamp_(min=1e-30)  # elsewhere it is never 0
    noise = torch.addcmul(logits, noise.log_(), heat, value=-1.0)
    noise.masked_fill_(logits < top[:, None] - _CUT * heat, float("-inf"))
    return best, noise.argmax(dim=-1)
