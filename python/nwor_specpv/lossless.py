"""Two-level acceptance: what partial steps accepted is a longer draft, and a full step judges it.

A full + refresh step of lossless mode runs over the re-fed tail and then the tree. The tail is a
chain: row 0 is its first token, which is confirmed, and the tree's root comes after its last one.
The chain is judged first; only when all of it stands does the tree count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import NworError
from .ops.acceptance import accept_chain_sampling, accept_greedy, accept_sampling

__all__ = ["TwoLevel", "confirm_greedy", "confirm_sampling"]


class TwoLevel(NamedTuple):
    """What a full step confirms."""

    confirmed: torch.Tensor  # [B] int32: tokens of the chain, its first one excluded
    path: torch.Tensor  # [B, R] int32: accepted rows of the tree, -1 padded
    counts: torch.Tensor  # [B] int32: how many; 0 when the chain was cut
    accepted: torch.Tensor  # [B] int32: confirmed + counts, what PartialCache.finish takes
    next_token: torch.Tensor  # [B] int64: the correction or bonus token

    @classmethod
    def of(
        cls,
        confirmed: torch.Tensor,
        whole: torch.Tensor,
        correction: torch.Tensor,
        tree: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> TwoLevel:
        """Of a chain, and of the tree behind it (`path`, `counts`, next tokens), which counts
        where the `whole` [B] chain was confirmed; elsewhere `correction` [B] follows."""
        path, counts, following = tree
        counts = torch.where(whole, counts, 0)
        path = torch.where(whole[:, None], path, -1)
        following = torch.where(whole, following, correction)
        return cls(confirmed, path, counts, confirmed + counts, following)


def confirm_greedy(
    chain: torch.Tensor,
    chain_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    tokens: torch.Tensor,
    target_ids: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
) -> TwoLevel:
    """Greedy: exactly what plain decoding would emit.

    `chain` [B, T + 1]: the re-fed tokens and, after the last of them, the tree's root: request b
    has `num_drafts[b]` (int32) tokens to confirm behind the first. `chain_ids` [B, T]: the
    target's argmax at the re-fed rows. `tokens`, `target_ids`, links [B, R]: the tree, as
    `accept_greedy` takes it.
    """
    _check_shapes(chain, "chain_ids", chain_ids, num_drafts, tokens)
    drafts = chain.shape[1] - 1
    _check_counts(num_drafts, drafts)
    places = torch.arange(drafts, device=chain.device)
    agrees = (chain_ids[:, :drafts] == chain[:, 1:]) & (places < num_drafts[:, None])
    confirmed = agrees.int().cumprod(1).sum(1).int()
    # Counts that cannot be are raised on the CPU; elsewhere nothing is confirmed, as by the ops.
    possible = (num_drafts >= 0) & (num_drafts <= drafts)
    confirmed = torch.where(possible, confirmed, 0)
    whole = possible & (confirmed == num_drafts)
    at = confirmed.clamp(max=max(drafts - 1, 0))[:, None].long()
    correction = chain_ids.gather(1, at)[:, 0] if drafts else target_ids[:, 0]
    correction = torch.where(possible, correction, -1)
    tree = accept_greedy(tokens, target_ids, first_child, next_sibling)
    return TwoLevel.of(confirmed, whole, correction, tree)


def confirm_sampling(
    chain: torch.Tensor,
    chain_probs: torch.Tensor,
    partial_probs: torch.Tensor | None,
    num_drafts: torch.Tensor,
    tokens: torch.Tensor,
    target_probs: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    chain_coins: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
) -> TwoLevel:
    """Sampling: what is emitted is distributed as full attention's probabilities say.

    `chain`, `num_drafts` as in `confirm_greedy`. `chain_probs` [B, T + 1, V]: the target's at the
    re-fed rows, a last row is not needed but may be there. `partial_probs` [B, T, V]: what each
    token of the chain was drawn from by its partial step (row i: token i + 1); then a token stands
    with probability min(1, p / q), as Leviathan et al. have it, which holds because a partial step
    is itself lossless for the partial distribution. None: it stands with probability p. Coins are
    uniform and fresh: `chain_coins` [B, T + 1], `coins` [B, R], `final_coins` [B].
    """
    _check_shapes(chain, "chain_probs", chain_probs, num_drafts, tokens)
    rows, wanted = chain.shape[1], [*tokens.shape, chain_probs.shape[2]]
    if list(target_probs.shape) != wanted:
        raise NworError(f"target_probs: got {list(target_probs.shape)}, expected {wanted}")
    if chain_probs.shape[1] < rows:  # the rule's bonus row; the tree is judged instead of it
        chain_probs = torch.cat([chain_probs, target_probs[:, :1].to(chain_probs.dtype)], 1)
    judged = accept_chain_sampling(
        chain, chain_probs, partial_probs, chain_coins, final_coins, num_drafts=num_drafts
    )
    tree = accept_sampling(tokens, target_probs, first_child, next_sibling, coins, final_coins)
    whole = judged[1] == num_drafts
    return TwoLevel.of(judged[1], whole, judged[2], tree)


def _check_shapes(
    chain: torch.Tensor,
    name: str,
    told: torch.Tensor,
    num_drafts: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    batch = tokens.shape[0]
    if chain.dim() != 2 or chain.shape[0] != batch or chain.shape[1] < 1:
        raise NworError(f"chain: got {list(chain.shape)}, expected [{batch}, 1 or more]")
    drafts, dim = chain.shape[1] - 1, 3 if name == "chain_probs" else 2
    if told.dim() != dim or told.shape[0] != batch or told.shape[1] < drafts:
        wanted = f"[{batch}, {drafts} or more{', V' if dim == 3 else ''}]"
        raise NworError(f"{name}: got {list(told.shape)}, expected {wanted}")
    if list(num_drafts.shape) != [batch]:
        raise NworError(f"num_drafts: got {list(num_drafts.shape)}, expected [{batch}]")


def _check_counts(num_drafts: torch.Tensor, drafts: int) -> None:
    """Where reading them costs nothing."""
    if num_drafts.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for index, count in enumerate(num_drafts.tolist()):
        if not 0 <= count <= drafts:
            raise NworError(f"num_drafts: got {count} at index {index}, expected 0 to {drafts}")
