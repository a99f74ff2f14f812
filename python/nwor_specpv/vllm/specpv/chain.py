"""Chains of drafts that grow pass by pass: device bookkeeping, without a word from the host.

Drafting begins after a full step. Request b has `prefix[b]` confirmed tokens, and its last token is
not among them: it is the root. Every pass of the target has the rows [root, guesses of the head];
what the target says after each row is right as far as the guesses were, so `accepted + 1` tokens
join the chain, K/V of as many rows joins the tail, and the last of them is the next root.

Everything here keeps its address and its shape, so that a pass can be captured in a CUDA graph.
Thread-safety: none.
"""

from __future__ import annotations

import torch


def matching_guesses(said: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
    """[B]: how many of the guesses [B, rows - 1] are, from the first on, what was said."""
    return (said[:, :-1] == guesses).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)


class Chains:
    """The chains of up to `max_batch` requests, `limit` drafts each, `rows` rows a pass."""

    def __init__(
        self, max_batch: int, rows: int, limit: int, max_len: int, device: torch.device
    ) -> None:
        self.rows, self.limit, self._max_len = rows, limit, max_len

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.prefix = zeros(max_batch)  # confirmed tokens
        self.active = zeros(max_batch, dtype=torch.bool)  # takes part
        self.lens = zeros(max_batch)  # drafts so far, which is the tail's length, too
        self.accepted = zeros(max_batch)  # guesses of the latest pass that were right
        self.starts = zeros(max_batch)  # where its first row stands in the text
        self.tokens = zeros(max_batch, rows, dtype=torch.int64)  # of the pass to come
        self.said = zeros(max_batch, rows, dtype=torch.int64)  # by the latest pass
        # What a pass says behind its last right guess is overwritten by the next one.
        self.drafts = zeros(max_batch, limit + rows, dtype=torch.int64)
        self._steps = torch.arange(rows, dtype=torch.int32, device=device)
        self._requests = torch.arange(max_batch, dtype=torch.int32, device=device)

    def begin(self, prefix: torch.Tensor, active: torch.Tensor, roots: torch.Tensor) -> None:
        """Begins chains of the first requests. All are [B]; the others only fill the batch."""
        count = prefix.shape[0]
        self.active.zero_()
        self.prefix.zero_()
        self.lens.zero_()
        self.active[:count] = active
        self.prefix[:count] = torch.where(active, prefix, 0)
        self.tokens[:count, 0] = roots

    def open(self, count: int) -> torch.Tensor:
        """[count]: requests whose chains may still grow."""
        return self.active[:count] & (self.lens[:count] < self.limit)

    def positions(self, count: int) -> torch.Tensor:
        """[count, rows] int64: where the rows of the pass to come stand in the text."""
        first = self.prefix[:count] + self.lens[:count]
        return (first[:, None] + self._steps).clamp(max=self._max_len - 1).long()

    def slots(self, count: int, capacity: int) -> torch.Tensor:
        """[count * rows] int64: where the rows' K/V lies in tails of `capacity`; -1: nowhere."""
        place = self._requests[:count, None] * capacity + self.lens[:count, None] + self._steps
        return torch.where(self.open(count)[:, None], place, -1).flatten().long()

    def columns(self, count: int) -> torch.Tensor:
        """[count, rows]: which drafts follow the chain; not below `limit`: none."""
        start = torch.where(self.open(count), self.lens[:count], self.limit)
        return start[:, None] + self._steps

    def extend(self, said: torch.Tensor) -> None:
        """A pass has said `said` [count, rows] int64 after its rows."""
        count = said.shape[0]
        grows = self.open(count)
        self.starts[:count] = self.prefix[:count] + self.lens[:count]
        self.drafts[:count].scatter_(1, self.columns(count).long(), said)
        self.said[:count] = said
        right = matching_guesses(said, self.tokens[:count, 1:])
        self.accepted[:count] = torch.where(grows, right, 0)
        self.lens[:count] += torch.where(grows, right + 1, 0)

    def next_roots(self, count: int) -> torch.Tensor:
        """[count] int64: the last token of each chain after `extend`."""
        return self.said[:count].gather(1, self.accepted[:count, None].long())[:, 0]

    def close(self, guesses: torch.Tensor) -> None:
        """Guesses [count, any number] that follow the chains; only the full step looks at them."""
        count, number = guesses.shape
        columns = self.columns(count)[:, :1] + torch.arange(number, device=guesses.device)
        # Nobody looks at columns from `limit` on.
        self.drafts[:count].scatter_(1, columns.clamp(max=self.drafts.shape[1] - 1), guesses)

    def guess(self, roots: torch.Tensor, guesses: torch.Tensor) -> None:
        """The rows of the pass to come: roots [count] and the head's guesses [count, rows - 1]."""
        count = roots.shape[0]
        self.tokens[:count, 0] = roots
        self.tokens[:count, 1:] = guesses


def window_of(
    block_table: torch.Tensor, lens: torch.Tensor, page_size: int, pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latest pages of each request, at most `pages`: their table, and the tokens in them."""
    pages = min(pages, block_table.shape[1])
    first = (-(-lens // page_size) - pages).clamp(min=0)
    steps = torch.arange(pages, dtype=torch.int32, device=lens.device)
    table = block_table.gather(1, (first[:, None] + steps).long())
    return table, (lens - first * page_size).to(torch.int32)


def slots_of(
    positions: torch.Tensor, ends: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Cache slots of positions [B, n] int64; -1 from `ends` [B] on, where nothing is reserved."""
    pages = (positions // page_size).clamp(max=block_table.shape[1] - 1)
    slots = block_table.gather(1, pages).long() * page_size + positions % page_size
    return torch.where(positions < ends[:, None], slots, -1)
