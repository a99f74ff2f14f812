"""The draft tree of every request, and what a step makes of them. Needs no vLLM.

A tree waits here from the proposal that drew it to the step that verifies it. Requests are named by
the index at which model runner V2 keeps their state. Everything is on the device, of fixed address,
and nothing is read on the host.

A tree is its depths, its mask and its links. Tokens come from the rows that are verified, so
whatever they are, a tree whose parts belong together gives the target's own text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from nwor_specpv import Tree, accept_greedy

from .shape import TreeShape


@dataclass(frozen=True)
class DraftedTrees:
    """Trees of a batch, of R rows each."""

    tokens: torch.Tensor  # [B, R] int64; that of the root is not known
    first_child: torch.Tensor  # [B, R] int32, -1: none
    next_sibling: torch.Tensor  # [B, R] int32, -1: none
    depths: torch.Tensor  # [B, R] int32
    mask: torch.Tensor  # [B, R, words] int64

    def copy_to(self, other: DraftedTrees) -> None:
        """Copies to the first trees of a larger batch."""
        for field in fields(self):
            part = getattr(self, field.name)
            getattr(other, field.name)[: part.shape[0]] = part


@dataclass
class StepTrees:
    """The trees that one step verifies, in the order of its B requests."""

    starts: torch.Tensor  # [B] int64: where a request's rows begin
    logit_starts: torch.Tensor  # [B] int64: the same among rows with logits
    first_child: torch.Tensor  # [B, R] int32, without links to rows that the step has not
    next_sibling: torch.Tensor
    num_requests: int  # at the front of the batch that `mask` is of
    mask: torch.Tensor  # [rows of those, words] int64
    num_rows: int  # of the whole batch
    # After acceptance.
    path: torch.Tensor | None = None  # [B, R] int32: accepted rows, -1 padded
    counts: torch.Tensor | None = None  # [B] int32
    walk: torch.Tensor | None = None  # [B, R] int64: the root, then accepted rows, 0 padded

    def accept(
        self, tokens: torch.Tensor, drawn: torch.Tensor, *, staged: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the step emits: tokens [B, R], and how many of them count, [B] int32.

        `tokens` and `drawn` [logits]: the token of every row with logits, and the one that the
        target's sampler draws after it. Without `staged` the cache holds the step's rows as if they
        were a chain: then no draft is accepted.
        """
        steps = torch.arange(self.first_child.shape[1], device=drawn.device)
        at = (self.logit_starts[:, None] + steps).clamp(max=drawn.shape[0] - 1)
        target = drawn[at]
        first_child = self.first_child if staged else torch.full_like(self.first_child, -1)
        self.path, self.counts, _ = accept_greedy(
            tokens[at], target, first_child, self.next_sibling
        )
        root = torch.zeros_like(self.path[:, :1])
        self.walk = torch.cat([root, self.path[:, :-1]], 1).clamp(min=0).long()
        return target.gather(1, self.walk), self.counts + 1

    def logit_order(self, size: int) -> torch.Tensor:
        """[size]: rows with logits, those of each walk at the front of their request's."""
        return self._order(self.logit_starts, size)

    def row_order(self, size: int) -> torch.Tensor:
        """[size]: the same of the rows of the batch."""
        return self._order(self.starts, size)

    def _order(self, starts: torch.Tensor, size: int) -> torch.Tensor:
        assert self.walk is not None
        assert self.counts is not None
        steps = torch.arange(self.walk.shape[1], device=starts.device)
        walked = steps <= self.counts[:, None]
        # What is beyond the walk says once more that the root stays where it is.
        places = starts[:, None] + torch.where(walked, steps, 0)
        sources = starts[:, None] + torch.where(walked, self.walk, 0)
        order = torch.arange(size, device=starts.device)
        return order.scatter_(0, places.flatten(), sources.flatten())

    def slot_places(self, depth: int) -> torch.Tensor:
        """[B, depth]: rows of the batch whose slots the first accepted rows go to."""
        steps = torch.arange(1, depth + 1, device=self.starts.device)
        return (self.starts[:, None] + steps).clamp(max=self.num_rows - 1)


class TreeStore:
    """Trees of up to `max_requests` requests. Thread-safety: none."""

    def __init__(
        self, shape: TreeShape, max_requests: int, max_tokens: int, device: torch.device
    ) -> None:
        self.shape = shape
        rows = torch.arange(shape.rows, device=device)
        chain = torch.where(rows < min(shape.depth, shape.rows - 1), rows + 1, -1)
        self._chain_child = chain.to(torch.int32)
        self._chain_mask = causal_words(rows, shape.words)
        self._rows = rows.to(torch.int32)
        links = torch.full((max_requests, shape.rows), -1, dtype=torch.int32, device=device)
        self._first_child, self._next_sibling = links, links.clone()
        self._depths = self._rows.repeat(max_requests, 1)
        self._masks = self._chain_mask.repeat(max_requests, 1, 1)
        self.chains = torch.zeros(max_requests, dtype=torch.bool, device=device)
        self._tokens = torch.arange(max_tokens, device=device)
        self._plain_positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        # Of steps in CUDA graphs, which read it here.
        self.mask = self._chain_mask[:1].repeat(max_tokens, 1)
        self.step: StepTrees | None = None  # the one that is under way, if it has drafts

    def room(self) -> DraftedTrees:
        """Memory for the trees of all requests."""
        tokens = torch.zeros_like(self._depths, dtype=torch.int64)
        parts = (self._first_child, self._next_sibling, self._depths, self._masks)
        return DraftedTrees(tokens, *(part.clone() for part in parts))

    # ---- between steps --------------------------------------------------------------------------

    def forget(self, request: int, *, chain: bool) -> None:
        """A request begins at this index; `chain`: its trees must be chains."""
        self._first_child[request] = -1
        self._next_sibling[request] = -1
        self.chains[request] = chain

    def drafted(self, tree: Tree, chain: torch.Tensor, chained: torch.Tensor) -> DraftedTrees:
        """Trees of a batch as they are kept; they may have fewer rows than the largest.

        `chained` [B]: requests whose trees must be chains; `chain` [B, depth]: tokens of these.
        They have their chain in the first rows, and the rows behind it belong to no tree.
        """
        chained = chained[:, None]
        child, sibling = (self._padded(one, -1) for one in (tree.first_child, tree.next_sibling))
        mask = self._padded(tree.mask, 0)
        mask = torch.nn.functional.pad(mask, (0, self.shape.words - mask.shape[2]))
        return DraftedTrees(
            torch.where(chained, self._padded(chain, 0, 1), self._padded(tree.tokens, 0)),
            torch.where(chained, self._chain_child, child),
            torch.where(chained, -1, sibling),
            torch.where(chained, self._rows, self._padded(tree.depths, 0)),
            torch.where(chained[..., None], self._chain_mask, mask),
        )

    def put(self, requests: torch.Tensor, drafted: DraftedTrees) -> torch.Tensor:
        """Keeps the trees of requests [B] for their next step; returns its drafts [B, R - 1]."""
        requests = requests.long()
        count = requests.shape[0]
        self._first_child[requests] = drafted.first_child[:count]
        self._next_sibling[requests] = drafted.next_sibling[:count]
        self._depths[requests] = drafted.depths[:count]
        self._masks[requests] = drafted.mask[:count]
        return drafted.tokens[:count, 1:]

    def _padded(self, part: torch.Tensor, value: int, before: int = 0) -> torch.Tensor:
        """A part of trees [B, rows, ..] with as many rows as the largest tree has."""
        part = part[:, : self.shape.rows - before]
        missing = self.shape.rows - before - part.shape[1]
        return torch.nn.functional.pad(
            part, (*([0] * (2 * (part.dim() - 2))), before, missing), value=value
        )

    # ---- in a step ------------------------------------------------------------------------------

    def begin(
        self,
        requests: torch.Tensor,
        query_start: torch.Tensor,
        logit_start: torch.Tensor,
        positions: torch.Tensor,
        lens: Sequence[int],
        drafts: Sequence[int] | None,
    ) -> None:
        """Opens a step of B requests and writes the positions of its rows, by depth.

        `requests` [B]; `query_start`, `logit_start` [B + 1]: where rows, and rows with logits,
        begin; `positions` [rows]: as if every request were a chain. `lens`, `drafts`: rows of each
        request, and how many are drafts, on the host; None: there are none.

        A request has a tree if all of its rows have logits. One whose drafts stand behind rows of
        its prompt has none, and no draft of it is accepted.
        """
        self.step = None
        batch = len(lens)
        front = max((b + 1 for b, number in enumerate(drafts or ()) if number), default=0)
        if lens[0] > 1 and all(number == lens[0] for number in lens):
            front = batch  # it may run as a graph, which reads the mask of every row
        if front == 0:
            return
        num_rows = sum(lens[:front])
        requests = requests[:batch].long()
        starts, logit_starts = query_start[:batch].long(), logit_start[:batch].long()
        num_logits = logit_start[1 : batch + 1] - logit_start[:batch]
        has_tree = query_start[1 : batch + 1] - query_start[:batch] == num_logits
        rows = torch.where(has_tree, num_logits, 1)[:, None]
        links = (self._first_child[requests], self._next_sibling[requests])
        # Rows ascend along links, so the first rows of a tree are a tree.
        first_child, next_sibling = (torch.where(one < rows, one, -1) for one in links)

        token = self._tokens[:num_rows]
        owner = torch.bucketize(token, query_start[1 : front + 1].long(), right=True)
        owner = owner.clamp(max=front - 1)
        local = token - starts[owner]
        inside = has_tree[owner]
        at = (requests[owner], local.clamp(max=self.shape.rows - 1))
        plain = self._plain_positions[:num_rows]
        plain.copy_(positions[:num_rows])
        positions[:num_rows] = plain + torch.where(inside, self._depths[at] - local, 0)
        mask = self._mask_rows(num_rows, max(lens[:front]))
        mask.copy_(causal_words(local, mask.shape[1]))
        words = mask[:, : self.shape.words]
        words.copy_(torch.where(inside[:, None], self._masks[at], words))
        mask[:, self.shape.words :].masked_fill_(inside[:, None], 0)
        self.step = StepTrees(
            starts, logit_starts, first_child, next_sibling, front, mask, sum(lens)
        )

    def mask_of(self, num_rows: int, *, capture: bool) -> torch.Tensor | None:
        """The mask of the first rows of a step, some of which may only fill it up; None: every
        request is a chain. With `capture` the step is only recorded into a CUDA graph."""
        if capture:
            return self.mask[:num_rows]
        if self.step is None:
            return None
        in_place = self.step.mask.shape[1] == self.shape.words
        return self.mask[:num_rows] if in_place else self.step.mask[:num_rows]

    def _mask_rows(self, num_rows: int, longest: int) -> torch.Tensor:
        """Memory for the mask of a step; prompts among its requests may need more words."""
        words = -(-longest // 64)
        if words <= self.shape.words:
            return self.mask[:num_rows]
        return torch.empty(num_rows, words, dtype=torch.int64, device=self.mask.device)

    def restore(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Ends a step: rows of each walk come first, at consecutive positions, as if drafts had
        been a chain. Returns where each row's data is now, [rows]; None: all is where it was.

        `ids`, `positions` [rows, padding included] are changed in place.
        """
        step, self.step = self.step, None
        if step is None or step.walk is None:
            return None
        num_rows = step.mask.shape[0]
        positions[:num_rows] = self._plain_positions[:num_rows]
        order = step.row_order(ids.shape[0])
        ids.copy_(ids[order])
        return order


def causal_words(rows: torch.Tensor, words: int) -> torch.Tensor:
    """[.., words] int64: masks of rows that see all rows up to themselves."""
    first = 64 * torch.arange(words, device=rows.device)
    bits = (rows[..., None].long() + 1 - first).clamp(0, 64)
    one = torch.ones_like(bits)
    return torch.where(bits == 64, -1, (one << bits.clamp(max=63)) - 1)
