"""Which drafts the target accepts: greedy and lossless sampling; and seeded coins."""

from __future__ import annotations

import torch

from ._call import call

__all__ = [
    "accept_chain_sampling",
    "accept_greedy",
    "accept_sampling",
    "make_coins",
]

Accepted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def accept_greedy(
    tokens: torch.Tensor,
    target_ids: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    *,
    status: torch.Tensor | None = None,
) -> Accepted:
    """A child is accepted iff its token equals `target_ids` (the target's argmax) at its parent.

    Returns `path` [B, R] int32 (accepted draft rows, the root excluded, -1 padded), `counts` [B]
    int32 and `next_token` [B] int64 (the correction or bonus token), all on the device.

    `status` (int64 [B], optional, here and below) receives one word per request, 0 or what
    `describe_status` explains. On CUDA a request with a fault accepts nothing and its next token is
    -1; on the CPU the fault is raised.
    """
    op = torch.ops.nwor_specpv.accept_greedy.default
    return call(op, tokens, target_ids, first_child, next_sibling, status)


def accept_sampling(
    tokens: torch.Tensor,
    target_probs: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    *,
    status: torch.Tensor | None = None,
) -> Accepted:
    """Lossless tree sampling: what is emitted is distributed as `target_probs` [B, R, V] say.

    `coins` [B, R] in [0, 1], one per depth: siblings share theirs, each taking the next piece of
    the target's mass; a token that an earlier sibling has counts once. `final_coins` [B] draws the
    token after the last accepted row from what its rejected children leave. A token of zero
    probability is never accepted or drawn.

    Thresholds below 1 are NOT lossless: they accept more drafts than the target would.
    `threshold_single`: a child of at least that probability is accepted whatever the coin.
    `threshold_acc`: the coin is scaled by it. Both in (0, 1].
    """
    return call(
        torch.ops.nwor_specpv.accept_sampling.default,
        tokens,
        target_probs,
        first_child,
        next_sibling,
        coins,
        final_coins,
        threshold_single,
        threshold_acc,
        status,
    )


def accept_chain_sampling(
    tokens: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    *,
    num_drafts: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> Accepted:
    """Lossless rejection sampling of chains (Leviathan et al.): row i + 1 is drafted below row i.

    A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced
    by a draw from max(p - q, 0). `draft_probs` [B, R - 1, V]: row i is the distribution that
    `tokens[:, i + 1]` was drawn from ([B, R, V] is taken too, its last row is not read). None: the
    drafter chose without randomness, q is one at its token. `num_drafts` [B]: drafts of each
    request where they are fewer than R - 1.
    """
    return call(
        torch.ops.nwor_specpv.accept_chain_sampling.default,
        tokens,
        target_probs,
        draft_probs,
        coins,
        final_coins,
        num_drafts,
        status,
    )


def make_coins(
    seeds: torch.Tensor, positions: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coins [B, num_rows] and final coins [B] for `accept_sampling`, in [0, 1).

    A coin is a function of its sequence's seed and of the position it decides (`positions` [B]: of
    the next token), by Philox4x32-10: the same seed gives the same tokens whatever else is in the
    batch, on the CPU and on CUDA.
    """
    return call(torch.ops.nwor_specpv.make_coins.default, seeds, positions, num_rows)
