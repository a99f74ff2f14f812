"""Drafting on the device: head and partial pass in turns, the chain grows.

    first   the head goes on from the full step, then a pass that chooses blocks by its queries
    kept    the same over the blocks of an earlier proposal, and all that came after them
    later   the head takes up what the pass has said, then a pass over the same view
    close   the head takes it up once more: its guesses follow the chain as they are

None reads anything on the host, so each is one captured graph per batch size. K/V of the passes
lies in the tail, never in the engine's cache.
"""

from __future__ import annotations

from typing import Protocol

import torch

from .chain import Chains
from .partial_pass import PartialPass
from .tail import Tail
from .views import ViewBatch, ViewStore


class Head(Protocol):
    """What guesses: a trained head, whose K/V has slots of its own in the engine's cache, or a
    lookup."""

    def go_on(self, count: int) -> torch.Tensor:
        """[count, rows - 1]: guesses after the full step's rows, which it has seen."""

    def take_up(
        self, chains: Chains, count: int, hidden: torch.Tensor, *, last: bool
    ) -> torch.Tensor:
        """The same after the rows of a pass, of which `chains.accepted` + 1 count.

        `last`: no pass follows, the full step judges these guesses. There may be more of them.
        """

    def tell(self, chains: Chains, count: int) -> None:
        """The drafts are complete: those that were not drawn can be told to the sampler."""


class PartialTarget(Protocol):
    """The target model over views."""

    def run(
        self,
        passed: PartialPass,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What it says after every row, [rows] int64, and what the head wants of each row."""


class DraftLoop:
    """The drafts of one engine: `begin`, `first` or `kept`, `later` as often as wanted, `close`."""

    def __init__(
        self,
        chains: Chains,
        store: ViewStore,
        tail: Tail,
        layer_index: dict[str, int],
        target: PartialTarget,
        head: Head,
        *,
        keeps_failure: bool = False,
    ) -> None:
        """`keeps_failure`: there are other ranks, see `PartialPass`; `check` raises it."""
        self.chains, self.store, self.tail = chains, store, tail
        self._layer_index = layer_index
        self._target, self._head = target, head
        batch, device = chains.prefix.shape[0], chains.prefix.device
        self._starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * chains.rows
        self._roots = torch.tensor([[0, 1]] * batch, dtype=torch.int32, device=device)
        # The root alone chooses blocks, not the guesses. Where guesses are drawn, a view must not
        # depend on the noise that draws them: passes have the same.
        self.by_root = False
        self._keeps_failure = keeps_failure
        self._failure: Exception | None = None  # of this proposal
        self._hidden: torch.Tensor | None = None
        # By batch size: views do not change between the passes of a proposal.
        self._plans: dict[int, torch.Tensor] = {}

    def begin(
        self,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        prefix: torch.Tensor,
        active: torch.Tensor,
        roots: torch.Tensor,
        *,
        select: bool = True,
    ) -> None:
        """Opens a proposal. [B] each but for the table [padded B, pages]; row -1: no view.

        `select`: `first` follows, else `kept`.

        A request that takes no part, is not longer than a view, or has no row sees its whole
        context.
        """
        count, padded = rows.shape[0], block_table.shape[0]
        self._failure = None
        self.chains.begin(prefix, active, roots)
        all_rows = torch.full((padded,), -1, dtype=torch.int32, device=rows.device)
        lens = self.chains.prefix[:padded]
        takes = active & (lens[:count] > self.store.budget.static_tokens)
        if not select:  # whoever has no choice, or too old a one, sees everything
            anchors = self.store.anchors[rows.long()]
            since = lens[:count] - anchors
            takes &= (anchors > 0) & (since >= 0) & (since <= self.store.budget.tail_capacity)
        all_rows[:count] = torch.where(takes, rows, -1)
        chooses = torch.full_like(all_rows, int(select))
        self.store.begin(ViewBatch(block_table, all_rows, lens, chooses), selects=select)

    def first(self, block_table: torch.Tensor) -> None:
        """The first pass of a proposal."""
        count = block_table.shape[0]
        self.chains.guess(self.chains.tokens[:count, 0].clone(), self._head.go_on(count))
        self._pass(block_table, first=True, select=True)
        self.store.end(count)

    def kept(self, block_table: torch.Tensor) -> None:
        """The first pass of a proposal that chooses no blocks."""
        count = block_table.shape[0]
        self.chains.guess(self.chains.tokens[:count, 0].clone(), self._head.go_on(count))
        self.store.build(count)
        self._pass(block_table, first=True, select=False)

    def later(self, block_table: torch.Tensor) -> None:
        """Another pass."""
        count = block_table.shape[0]
        assert self._hidden is not None
        guesses = self._head.take_up(self.chains, count, self._hidden, last=False)
        self.chains.guess(self.chains.next_roots(count), guesses)
        self._pass(block_table, first=False, select=False)

    def close(self, block_table: torch.Tensor) -> None:
        """After the last pass. The full step has rows for these guesses in any case."""
        count = block_table.shape[0]
        assert self._hidden is not None
        self.chains.close(self._head.take_up(self.chains, count, self._hidden, last=True))
        self._head.tell(self.chains, count)

    def check(self) -> None:
        """Raises what has failed in a pass of this proposal. Replays of graphs run none of it."""
        failure, self._failure = self._failure, None  # it holds on to the step it is of
        if failure is not None:
            raise failure

    def _pass(self, block_table: torch.Tensor, *, first: bool, select: bool) -> None:
        chains, count = self.chains, block_table.shape[0]
        passed = PartialPass(
            store=self.store,
            tail=self.tail,
            layer_index=self._layer_index,
            block_table=block_table,
            prefix_lens=chains.prefix[:count],
            tail_lens=chains.lens[:count].clone(),  # as they are before the chain grows
            query_start=self._starts[: count + 1],
            slots=chains.slots(count, self.tail.capacity),
            num_rows=chains.rows,
            has_tail=not first,
            select=select,
            query_rows=self._roots[:count] if select and self.by_root else None,
            plan=self._plans.get(count),
            planned=not first and count in self._plans,
            keeps_failure=self._keeps_failure,
            failure=self._failure,  # views of a pass that failed are not there for the next one
        )
        said, hidden = self._target.run(
            passed,
            chains.tokens[:count].flatten(),
            chains.positions(count).flatten(),
            chains.columns(count).flatten(),
        )
        self._failure = passed.failure
        if passed.plan is not None:
            self._plans[count] = passed.plan
        # Of the same address in every pass: the next one is a graph of its own.
        if self._hidden is None:
            most = chains.prefix.shape[0] * chains.rows
            self._hidden = hidden.new_zeros(most, *hidden.shape[1:])
        self._hidden[: hidden.shape[0]] = hidden
        chains.extend(said.view(count, chains.rows))
