"""Grows draft trees level by level on the device. Needs no vLLM.

In each level the head runs over all rows that it has kept so far. They see the text before the root
and their ancestors, so nothing of a level has to be kept in a cache. Shapes depend on the batch
alone and nothing is read on the host: all levels can be captured in one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nwor_specpv import Tree, tree_from_topk

from .shape import TreeShape

# Log-probability of candidates that a chain has no use for.
_UNLIKELY = -1.0e9

# (tokens [B, n], states [B, n, H], mask [B, n] int64, levels [n]) -> outputs and states [B, n, H]:
# the head over n rows of each request, where row j is `levels[j]` tokens behind the root.
RunHead = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
# Outputs [.., H] -> the likeliest tokens after each, and their log-probabilities, [.., width].
FindBest = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Grown:
    """Trees of a batch."""

    tree: Tree
    chain: torch.Tensor  # [B, depth] int64: the likeliest chain of requests that want chains


def grow(
    shape: TreeShape,
    tokens: torch.Tensor,
    scores: torch.Tensor,
    states: torch.Tensor,
    chained: torch.Tensor,
    run: RunHead,
    best: FindBest,
) -> Grown:
    """Trees below the last emitted tokens.

    `tokens`, `scores` [B, width]: the likeliest tokens after these; `states` [B, H]: what the head
    has made of the text up to them. `chained` [B]: requests of which only `chain` is wanted.
    """
    batch, width = tokens.shape
    device = tokens.device
    places = torch.arange(shape.depth * width, device=device)
    levels = places // width + 1
    bits = torch.ones_like(places) << places  # those of rows that are run are below 64
    # Candidates that a chain has no use for: all but the first of a level.
    idle = chained[:, None] & (torch.arange(width * width, device=device) > 0)
    kept = places[:width].expand(batch, width)
    seen = bits[:width].expand(batch, width)
    scores = scores.masked_fill(idle[:, :width], _UNLIKELY)
    rows = [(tokens, states[:, None].expand(-1, width, -1), seen)]
    found = [(tokens, scores)]
    parents: list[torch.Tensor] = []
    chain = [tokens[:, 0]]
    for depth in range(1, shape.depth):
        inputs = [torch.cat(parts, 1) for parts in zip(*rows, strict=True)]
        outputs, after = run(*inputs, levels[: depth * width])
        children, chances = best(outputs[:, -width:])
        children = children.flatten(1)
        chances = (chances + scores[..., None]).flatten(1).masked_fill(idle, _UNLIKELY)
        found.append((children, chances))
        parents.append(kept)
        scores, index = chances.topk(width, dim=-1)
        tokens = children.gather(1, index)
        chain.append(tokens[:, 0])
        if depth + 1 == shape.depth:  # nothing grows below
            break
        above = index // width
        state = after[:, -width:].gather(1, above[..., None].expand(-1, -1, after.shape[2]))
        seen = seen.gather(1, above) | bits[depth * width : (depth + 1) * width]
        rows.append((tokens, state, seen))
        kept = index + (width + width * width * (depth - 1))
    nothing = torch.zeros(batch, dtype=torch.int32, device=device)
    steps, chances = zip(*found, strict=True)
    tree = tree_from_topk(steps, chances, parents, nothing.long(), nothing, shape.rows)
    return Grown(tree, torch.stack(chain, 1))
