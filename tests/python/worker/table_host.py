"""A target whose next token depends on the last one alone, by a table of fractions.

Its distributions have small denominators, so coins on a grid decide as all coins would.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch

from nwor_specpv import Interceptor, NworConfig, SessionBatch, SessionStore
from nwor_specpv.worker import Client, Judge, Server, judging
from tests.python.worker.serving import PATIENCE_S

Table = list[list[Fraction]]  # [token] -> distribution of the next one


class TableHost:
    """Logits are `temperature` times the logarithms of the table's rows."""

    def __init__(self, table: Table, temperature: float = 1.0) -> None:
        probs = torch.tensor([[float(value) for value in row] for row in table])
        self._logits = (probs.log() * temperature).clamp(min=-1e4)
        self._interceptor = Interceptor(NworConfig())
        keys, values = (torch.zeros(64, 16, 1, 8) for _ in range(2))
        self._interceptor.bind_layer("0", keys, values)
        self.judge = Judge()
        self.store = SessionStore(
            self._interceptor, self._forward, self.judge.accept, vocab_size=len(table)
        )

    def _forward(self, batch: SessionBatch) -> torch.Tensor:
        rows = torch.zeros(len(batch.tokens), 1, 8)
        self._interceptor.write("0", rows, rows, batch.slot_mapping, epoch=batch.epoch)
        return self._logits[batch.tokens]


@contextmanager
def serving_table(table: Table, temperature: float = 1.0) -> Iterator[Client]:
    host = TableHost(table, temperature)
    server = Server(host.store, model="table", vocab_size=len(table), judge=host.judge)
    with server, Client(server.address, timeout=PATIENCE_S) as client:
        yield client


def coins_by_seed(
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    cells: int,
    final_cells: int,
    finals: tuple[int, ...] = (1,),
) -> range:
    """Makes seeds stand for all coins on a grid, each in the middle of its cell.

    Coins decide positions 1 to `depth`; final coins belong to passes whose next position is one of
    `finals`. Returns the seeds.
    """
    grids = [range(cells)] * depth + [range(final_cells)] * len(finals)
    all_coins = list(itertools.product(*grids))

    def make_coins(seeds: torch.Tensor, positions: torch.Tensor, rows: int) -> Any:
        drawn, position = all_coins[int(seeds[0])], int(positions[0])
        coins = [
            (drawn[at - 1] + 0.5) / cells if at <= depth else 0.0
            for at in range(position, position + rows)
        ]
        final = drawn[depth + finals.index(position)]
        return torch.tensor([coins]), torch.tensor([(final + 0.5) / final_cells])

    monkeypatch.setattr(judging, "make_coins", make_coins)
    return range(len(all_coins))


def emitted(runs: list[tuple[Fraction, list[int]]], table: Table, length: int) -> dict:
    """The distribution of the next `length` tokens, from weighted runs; short ones go on by the
    table.
    """
    found: dict[tuple[int, ...], Fraction] = {}
    for weight, run in runs:
        for tokens, share in _continued(tuple(run[:length]), table, length):
            found[tokens] = found.get(tokens, Fraction(0)) + weight * share
    return found


def plain(root: int, table: Table, length: int) -> dict:
    """The same by plain decoding."""
    sequences = _continued((root,), table, length + 1)
    return {tokens[1:]: share for tokens, share in sequences}


def _continued(
    tokens: tuple[int, ...], table: Table, length: int
) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    if len(tokens) == length:
        yield tokens, Fraction(1)
        return
    for token, share in enumerate(table[tokens[-1]]):
        if share:
            for sequence, rest in _continued((*tokens, token), table, length):
                yield sequence, share * rest
