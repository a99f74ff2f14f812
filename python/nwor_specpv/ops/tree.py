"""Draft trees: what a drafter proposes, as attention, acceptance and commit need it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nwor_specpv import _C
from nwor_specpv.errors import NworError

from ._call import call

__all__ = [
    "MAX_TREE_ROWS",
    "Tree",
    "describe_status",
    "tree_from_chain",
    "tree_from_parents",
    "tree_from_topk",
]

MAX_TREE_ROWS = 256

# Faults whose value is a float's bits.
_FLOAT_FAULTS = frozenset({"coin", "probability", "probability_sum", "draft_sum"})


@dataclass
class Tree:
    """The draft trees of a batch. Row 0 is the root (the last emitted token).

    On CUDA nothing here has been looked at by the host: `status` holds one word per request, 0 for
    a valid tree, and an invalid one has become a tree of its root alone.
    """

    tokens: torch.Tensor | None  # [B, R] int64
    parents: torch.Tensor  # [B, R] int32, -1 = the root
    positions: torch.Tensor  # [B, R] int64: prefix length + depth
    depths: torch.Tensor  # [B, R] int32
    mask: torch.Tensor  # [B, R, W] int64: bit j of word w = row 64 * w + j is visible
    first_child: torch.Tensor  # [B, R] int32, -1 = none
    next_sibling: torch.Tensor  # [B, R] int32, -1 = none
    status: torch.Tensor  # [B] int64

    @property
    def is_valid(self) -> torch.Tensor:
        """A device word (0-dimensional bool): every tree of the batch is valid. No host sync."""
        return (self.status == 0).all()

    @property
    def rows(self) -> int:
        """Of every tree, the root included."""
        return self.parents.shape[1]

    @property
    def flat_mask(self) -> torch.Tensor:
        """[B * R, W]: `tree_mask` of verify_attention when every request has R rows."""
        return self.mask.flatten(0, 1)

    def dense_mask(self, prefix_lens: torch.Tensor | Sequence[int] | None = None) -> torch.Tensor:
        """The mask as bool: [B, R, R] over the rows, or with prefix columns [B, R, longest + R].

        With `prefix_lens`, columns are a request's tokens in order: its prefix, all visible, then
        its rows; columns beyond are False. That form waits for the device: it needs the longest.
        """
        rows = self.rows
        row = torch.arange(rows, device=self.mask.device)
        dense = (self.mask[:, :, row // 64] >> (row % 64)).bitwise_and_(1).bool()
        if prefix_lens is None:
            return dense
        lens = torch.as_tensor(prefix_lens, dtype=torch.int64, device=self.mask.device)
        batch = dense.shape[0]
        if lens.shape != (batch,):
            raise NworError(f"prefix_lens: got sizes {list(lens.shape)}, expected [{batch}]")
        longest = int(lens.max()) if batch else 0
        if batch and int(lens.min()) < 0:
            raise NworError(f"prefix_lens: got {int(lens.min())}, expected 0 or more")
        column = torch.arange(longest + rows, device=self.mask.device)
        full = (column < lens[:, None])[:, None, :].repeat(1, rows, 1)
        places = (lens[:, None] + row)[:, None, :].expand(-1, rows, -1)
        return full.scatter_(2, places, dense)

    def check(self) -> None:
        """Raises NworError for the first invalid tree. Waits for the device."""
        for request, word in enumerate(self.status.tolist()):
            if word:
                raise NworError(f"tree of request {request}: got {describe_status(word)}")


def describe_status(word: int) -> str:
    """What a status word of a tree or an acceptance says, in words."""
    code, row, value = word & 0xFF, word >> 8 & 0xFFFFFF, word >> 32
    if code >= len(_C.TREE_FAULTS):
        return f"unknown fault {code} at row {row} (value {value})"
    label, sentence = _C.TREE_FAULTS[code]
    return f"{label} at row {row}{_describe_value(label, value)}, expected ok: {sentence}"


def _describe_value(label: str, value: int) -> str:
    if label == "logits" or (label == "probability" and value == 0):  # none was told
        return ""
    if label == "parameter" and 1 <= value <= len(_C.SAMPLING_OPTIONS):
        return f" ({_C.SAMPLING_OPTIONS[value - 1]})"
    if label in _FLOAT_FAULTS:
        (number,) = struct.unpack("<f", struct.pack("<i", value))
        return f" (value {number:.7g})"
    return f" (value {value})"


def tree_from_parents(
    parents: torch.Tensor,
    prefix_lens: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    num_rows: torch.Tensor | None = None,
) -> Tree:
    """Trees from parent lists: `parents` [B, R] with -1 for row 0 and an earlier row elsewhere.

    `num_rows` [B]: rows of each request; those beyond are padding that sees nothing and is never
    reached. On the CPU an invalid tree raises with its row named; on CUDA see `Tree.status`.
    """
    if tokens is not None:
        if tokens.dtype not in (torch.int32, torch.int64):
            got = tokens.dtype
            raise NworError(f"tokens: got dtype {got}, expected torch.int32 or torch.int64")
        if tokens.shape != parents.shape:
            got, expected = list(tokens.shape), list(parents.shape)
            raise NworError(f"tokens: got sizes {got}, expected {expected} as parents")
        if tokens.device != parents.device:
            got, expected = tokens.device, parents.device
            raise NworError(f"tokens: got device {got}, expected {expected} as parents")
    built = call(torch.ops.nwor_specpv.tree_from_parents.default, parents, prefix_lens, num_rows)
    return Tree(None if tokens is None else tokens.to(torch.int64), *built)


def tree_from_chain(
    tokens: torch.Tensor, prefix_lens: torch.Tensor, *, num_rows: torch.Tensor | None = None
) -> Tree:
    """Chains: row i + 1 below row i. `tokens` [B, R], the root first."""
    if tokens.dim() != 2:
        raise NworError(f"tokens: got sizes {list(tokens.shape)}, expected [requests, rows]")
    rows = tokens.shape[1]
    if not 1 <= rows <= MAX_TREE_ROWS:
        raise NworError(f"tokens: got {rows} rows, expected 1 .. {MAX_TREE_ROWS}")
    chain = torch.arange(-1, rows - 1, dtype=torch.int32, device=tokens.device)
    return tree_from_parents(chain.expand(tokens.shape), prefix_lens, tokens, num_rows=num_rows)


def tree_from_topk(
    token_steps: Sequence[torch.Tensor],
    score_steps: Sequence[torch.Tensor],
    parent_steps: Sequence[torch.Tensor],
    root_tokens: torch.Tensor,
    prefix_lens: torch.Tensor,
    num_rows: int,
) -> Tree:
    """The best `num_rows - 1` of a top-k drafter's candidates below the root (EAGLE layout).

    Step 0 has k candidates, ids 0 .. k-1; step s has k * k, child b of kept parent a being id
    k + k*k*(s-1) + a*k + b. `token_steps`, `score_steps`: [B, k], then [B, k, k] or [B, k*k];
    scores have the parents' multiplied in. `parent_steps`, joined along the last dimension: the ids
    each step keeps as parents of the next, k per step, with or without -1 in front for the root,
    once or k times.

    Rows are ordered by candidate id, so parents come first. Equal scores go to the lower id. A
    child that scores above its parent counts as its equal: no row is left without its parent.
    """
    built = call(
        torch.ops.nwor_specpv.tree_from_topk.default,
        list(token_steps),
        list(score_steps),
        list(parent_steps),
        root_tokens,
        prefix_lens,
        num_rows,
    )
    return Tree(*built)
