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
    links: torch.Tensor  # [B, 3, R] int32: first children, next siblings, depth less row
    mask: torch.Tensor  # [B, R, words] int64

    def copy_to(self, other: DraftedTrees) -> None:
        """Copies to the first trees of a larger batch."""
        for field in fields(self):
            part = getattr(self, field.name)
            getattr(other, field.name)[: part.shape[0]] = part


@dataclass
class StepTrees:
    """The trees that one step verifies, in the order of its B requests."""

    starts: torch.Tensor  # [B]: where a request's rows begin
    logit_starts: torch.Tensor  # [B]: the same among rows with logits
    first_child: torch.Tensor  # [B, R] int32, without links to rows that the step has not
    next_sibling: torch.Tensor
    num_requests: int  # at the front of the batch that `mask` is of
    mask: torch.Tensor  # [rows of those, words] int64
    num_rows: int  # of the whole batch
    offsets: torch.Tensor  # [rows of those] what was added to their positions
    steps: torch.Tensor  # 0, 1, ..: at least R
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
        tokens, target = self._of_trees(tokens), self._of_trees(drawn)
        first_child = self.first_child if staged else torch.full_like(self.first_child, -1)
        self.path, self.counts, _ = accept_greedy(tokens, target, first_child, self.next_sibling)
        # The root is never on a path, so the last entry is -1.
        self.walk = self.path.long().roll(1, dims=1).clamp_(min=0)
        return target.gather(1, self.walk), self.counts + 1

    def _of_trees(self, values: torch.Tensor) -> torch.Tensor:
        """[B, R] of [logits]."""
        steps = self.steps[: self.first_child.shape[1]]
        return values[(self.logit_starts[:, None] + steps).clamp(max=values.shape[0] - 1)]

    def logit_order(self, size: int) -> torch.Tensor:
        """[size]: rows with logits, those of each walk at the front of their request's."""
        return self._order(self.logit_starts, size)

    def row_order(self, size: int) -> torch.Tensor:
        """[size]: the same of the rows of the batch."""
        return self._order(self.starts, size)

    def _order(self, starts: torch.Tensor, size: int) -> torch.Tensor:
        assert self.walk is not None
        assert self.counts is not None
        steps = self.steps[: self.walk.shape[1]]
        walked = steps <= self.counts[:, None]
        # What is beyond the walk says once more that the root stays where it is.
        places = starts[:, None] + torch.where(walked, steps, 0)
        sources = starts[:, None] + torch.where(walked, self.walk, 0)
        order = torch.arange(size, device=starts.device)
        return order.scatter_(0, places.flatten(), sources.flatten())

    def slot_places(self, depth: int) -> torch.Tensor:
        """[B, depth]: rows of the batch whose slots the first accepted rows go to."""
        places = self.starts[:, None] + self.steps[1 : depth + 1]
        return places.clamp(max=self.num_rows - 1)


@dataclass
class WholeTrees(StepTrees):
    """Where every row of the batch belongs to a tree, and all trees have R rows: the step of a full
    CUDA graph, in which every launch is felt."""

    def _of_trees(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(self.first_child.shape)

    def _order(self, starts: torch.Tensor, size: int) -> torch.Tensor:
        """What is beyond a walk is rejected, and may be anything of its request."""
        assert self.walk is not None
        order = (starts[:, None] + self.walk).flatten()
        if size > order.shape[0]:  # rows that fill up a graph
            order = torch.cat([order, self.steps[order.shape[0] : size]])
        return order

    def slot_places(self, depth: int) -> torch.Tensor:
        """See the base class."""
        return self.starts[:, None] + self.steps[1 : depth + 1]


class TreeStore:
    """Trees of up to `max_requests` requests. Thread-safety: none."""

    def __init__(
        self, shape: TreeShape, max_requests: int, max_tokens: int, device: torch.device
    ) -> None:
        self.shape = shape
        rows = torch.arange(shape.rows, device=device)
        child = torch.where(rows < min(shape.depth, shape.rows - 1), rows + 1, -1)
        nothing = torch.full_like(child, -1)
        self._chain_links = torch.stack([child, nothing, torch.zeros_like(child)]).to(torch.int32)
        self._chain_mask = causal_words(rows, shape.words)
        self._rows = rows.to(torch.int32)
        # [3, requests, R], as in DraftedTrees but for the order.
        self._links = self._chain_links[:, None].repeat(1, max_requests, 1)
        self._links[:2] = -1
        self._masks = self._chain_mask.repeat(max_requests, 1, 1)
        self.chains = torch.zeros(max_requests, dtype=torch.bool, device=device)
        self._tokens = torch.arange(max(max_tokens, shape.rows + 1), device=device)
        # Of steps in CUDA graphs, which read it here.
        self.mask = self._chain_mask[:1].repeat(max_tokens, 1)
        self.step: StepTrees | None = None  # the one that is under way, if it has drafts

    def room(self) -> DraftedTrees:
        """Memory for the trees of all requests."""
        tokens = torch.zeros_like(self._links[0], dtype=torch.int64)
        links = self._links.transpose(0, 1).contiguous()
        return DraftedTrees(tokens, links, self._masks.clone())

    # ---- between steps --------------------------------------------------------------------------

    def forget(self, request: int, *, chain: bool) -> None:
        """A request begins at this index; `chain`: its trees must be chains."""
        self._links[:2, request] = -1
        self.chains[request] = chain

    def drafted(self, tree: Tree, chain: torch.Tensor, chained: torch.Tensor) -> DraftedTrees:
        """Trees of a batch as they are kept; they may have fewer rows than the largest.

        `chained` [B]: requests whose trees must be chains; `chain` [B, depth]: tokens of these.
        They have their chain in the first rows, and the rows behind it belong to no tree.
        """
        depths = torch.where(tree.depths > 0, tree.depths - self._rows[: tree.rows], 0)
        links = torch.stack(
            [self._padded(part, fill) for part, fill in (
                (tree.first_child, -1), (tree.next_sibling, -1), (depths, 0)
            )],
            1,
        )  # fmt: skip
        mask = self._padded(tree.mask, 0)
        mask = torch.nn.functional.pad(mask, (0, self.shape.words - mask.shape[2]))
        chained = chained[:, None]
        return DraftedTrees(
            torch.where(chained, self._padded(chain, 0, 1), self._padded(tree.tokens, 0)),
            torch.where(chained[..., None], self._chain_links, links),
            torch.where(chained[..., None], self._chain_mask, mask),
        )

    def put(self, requests: torch.Tensor, drafted: DraftedTrees) -> torch.Tensor:
        """Keeps the trees of requests [B] for their next step; returns its drafts [B, R - 1]."""
        requests = requests.long()
        count = requests.shape[0]
        self._links[:, requests] = drafted.links[:count].transpose(0, 1)
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
        batch, rows = len(lens), lens[0]
        alike = rows > 1 and all(number == rows for number in lens)
        front = max((b + 1 for b, number in enumerate(drafts or ()) if number), default=0)
        starts, logit_starts = query_start[:batch], logit_start[:batch]
        if alike and rows <= self.shape.rows and drafts and min(drafts) == rows - 1:
            self.step = self._begin_whole(requests[:batch].long(), starts, rows, positions)
            return
        if alike:
            front = batch  # it may run as a graph, which reads the mask of every row
        if front == 0:
            return
        num_rows = sum(lens[:front])
        requests = requests[:batch].long()
        num_logits = logit_start[1 : batch + 1] - logit_starts
        has_tree = query_start[1 : batch + 1] - starts == num_logits
        links = self._links[:, requests]
        # Rows ascend along links, so the first rows of a tree are a tree.
        kept = torch.where(has_tree, num_logits, 1)[:, None]
        first_child, next_sibling = torch.where(links[:2] < kept, links[:2], -1).unbind()

        token = self._tokens[:num_rows]
        owner = torch.bucketize(token, query_start[1 : front + 1].long(), right=True)
        owner = owner.clamp(max=front - 1)
        local = token - starts[owner]
        inside = has_tree[owner]
        at = local.clamp(max=self.shape.rows - 1)
        offsets = torch.where(inside, links[2][owner, at], 0)
        positions[:num_rows] += offsets
        mask = self._mask_rows(num_rows, max(lens[:front]))
        mask.copy_(causal_words(local, mask.shape[1]))
        words = mask[:, : self.shape.words]
        words.copy_(torch.where(inside[:, None], self._masks[requests[owner], at], words))
        mask[:, self.shape.words :].masked_fill_(inside[:, None], 0)
        self.step = StepTrees(
            starts,
            logit_starts,
            first_child,
            next_sibling,
            front,
            mask,
            sum(lens),
            offsets,
            self._tokens,
        )

    def _begin_whole(
        self, requests: torch.Tensor, starts: torch.Tensor, rows: int, positions: torch.Tensor
    ) -> WholeTrees:
        """The first `rows` rows of every tree are all that the batch has."""
        count = requests.shape[0]
        number = count * rows
        links = self._links[:, :, :rows][:, requests]
        first_child, next_sibling, offsets = links.unbind()
        if rows < self.shape.rows:  # a smaller tree has no links beyond itself, but one may be cut
            first_child, next_sibling = torch.where(links[:2] < rows, links[:2], -1).unbind()
        offsets = offsets.flatten()
        positions[:number] += offsets
        mask = self.mask[:number]
        torch.index_select(
            self._masks[:, :rows], 0, requests, out=mask.view(count, rows, self.shape.words)
        )
        return WholeTrees(
            starts,
            starts,
            first_child,
            next_sibling,
            count,
            mask,
            number,
            offsets,
            self._tokens,
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
        positions[: step.offsets.shape[0]] -= step.offsets
        order = step.row_order(ids.shape[0])
        ids.copy_(ids[order])
        return order


def causal_words(rows: torch.Tensor, words: int) -> torch.Tensor:
    """[.., words] int64: masks of rows that see all rows up to themselves."""
    first = 64 * torch.arange(words, device=rows.device)
    bits = (rows[..., None].long() + 1 - first).clamp(0, 64)
    one = torch.ones_like(bits)
    return torch.where(bits == 64, -1, (one << bits.clamp(max=63)) - 1)
