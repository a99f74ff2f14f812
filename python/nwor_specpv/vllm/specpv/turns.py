"""The passes of one proposal (model runner V1): what each is asked, how answers grow chains.

Nothing here waits for another rank, so that ranks can agree between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nwor_specpv import _C

from .partial_pass import PartialPass
from .tail import Tail
from .views import ViewStore


@dataclass(frozen=True)
class Turn:
    """One pass that is ready to run. Every request has `passed.num_rows` rows."""

    passed: PartialPass
    tokens: torch.Tensor  # [rows] int32
    positions: torch.Tensor  # [rows] int64
    guesses: list[list[int]]  # by request: tokens behind its first row
    busy: list[bool]  # by request: its chain has room


class Turns:
    """A proposal: `next`, whoever runs the pass, `judge`, and so on. Thread-safety: none."""

    def __init__(
        self,
        store: ViewStore,
        tail: Tail,
        layer_index: dict[str, int],
        block_table: torch.Tensor,
        texts: Sequence[_C.NgramIndex],
        prefix: Sequence[int],
        *,
        limit: int,
        inner: int,
        max_len: int,
        select_interval: int,
        keeps_failure: bool,
    ) -> None:
        """`prefix`: tokens of each text in the cache. Chains have up to `limit` tokens, passes up
        to `inner` guesses looked up in the text; blocks are chosen in every `select_interval`th
        pass, 0: in the first alone."""
        self._store, self._tail, self._layer_index = store, tail, layer_index
        self.block_table = block_table
        self._texts, self._prefix = texts, prefix
        self._limit, self._inner, self._max_len = limit, inner, max_len
        self._select_interval, self._keeps_failure = select_interval, keeps_failure
        self.prefix_lens = self._ints(prefix)
        self.number = 0  # of passes that were judged
        self.grown: list[int] = []  # tokens that a pass has added to a chain
        self._chains: list[list[int]] = [[] for _ in texts]
        self._kept = [0] * len(texts)  # rows of each in the tail

    def next(self) -> Turn | None:
        """The next pass; None: chains are as long as they may be."""
        busy = [len(chain) < self._limit for chain in self._chains]
        if not any(busy):
            return None
        guesses = [
            text.lookup(chain, self._inner) if more else []
            for text, chain, more in zip(self._texts, self._chains, busy, strict=True)
        ]
        num_rows, number = 1 + max(map(len, guesses)), self.number
        tokens, positions, slots = [], [], []
        for b, (text, chain, kept) in enumerate(
            zip(self._texts, self._chains, self._kept, strict=True)
        ):
            root = chain[-1] if chain else text.last
            line = [root, *guesses[b]]
            used = len(line) if busy[b] else 0
            tokens += line + [root] * (num_rows - len(line))
            first = self._prefix[b] + kept
            positions += [min(first + j, self._max_len - 1) for j in range(num_rows)]
            slots += [self._tail.slot(b, kept + j) if j < used else -1 for j in range(num_rows)]
        interval = self._select_interval
        passed = PartialPass(
            store=self._store,
            tail=self._tail,
            layer_index=self._layer_index,
            block_table=self.block_table,
            prefix_lens=self.prefix_lens,
            tail_lens=self._ints(self._kept),
            query_start=self._ints([b * num_rows for b in range(len(busy) + 1)]),
            slots=self._ints(slots, torch.int64),
            num_rows=num_rows,
            has_tail=number > 0,
            select=number == 0 or (interval > 0 and number % interval == 0),
            query_rows=self._ints([[0, 1 + len(guess)] for guess in guesses]),
            keeps_failure=self._keeps_failure,
        )
        return Turn(passed, self._ints(tokens), self._ints(positions, torch.int64), guesses, busy)

    def judge(self, turn: Turn, said: list[int]) -> None:
        """The pass has `said` what follows each row: guesses that it confirms, and one token."""
        num_rows = turn.passed.num_rows
        for b, guess in enumerate(turn.guesses):
            if not turn.busy[b]:
                continue
            line = said[b * num_rows : (b + 1) * num_rows]
            right = 0
            while right < len(guess) and guess[right] == line[right]:
                right += 1
            self._chains[b] += [*guess[:right], line[right]]
            self._kept[b] += 1 + right
            self.grown.append(1 + right)
        self.number += 1

    def drafts(self) -> list[list[int]]:
        """The chains, by request."""
        return [chain[: self._limit] for chain in self._chains]

    def _ints(self, values: Sequence, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._tail.keys.device)
