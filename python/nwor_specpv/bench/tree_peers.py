"""The tree formulations our ops replace: plain torch, and plain Python over lists.

Torch ones launch no host sync, so they can be captured like ours. Python ones are the rule as one
would write it down. Both take what the ops take and give what they give.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def torch_build(
    tokens: list[torch.Tensor],
    scores: list[torch.Tensor],
    kept: list[torch.Tensor],
    roots: torch.Tensor,
    lens: torch.Tensor,
    rows: int,
) -> dict[str, torch.Tensor]:
    """EAGLE's selection with topk, sort and searchsorted; masks by multiplying adjacency."""
    batch, k = tokens[0].shape
    device = roots.device
    all_tokens, all_scores = torch.cat(tokens, 1), torch.cat(scores, 1)
    chosen = all_scores.topk(rows - 1, dim=1).indices.sort(dim=1).values
    drafts = all_tokens.gather(1, chosen)
    root = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
    above = torch.cat([root, *kept[: len(tokens) - 1]], 1)
    slot = torch.where(chosen < k, 0, 1 + (chosen - k).div(k, rounding_mode="floor"))
    parent_id = above.gather(1, slot)
    parents = torch.where(parent_id < 0, 0, 1 + torch.searchsorted(chosen, parent_id))
    parents = torch.cat([root, parents], 1)
    adjacency = torch.eye(rows, device=device).repeat(batch, 1, 1)
    adjacency.scatter_(2, parents.clamp(min=0)[:, :, None], 1.0)
    visible = adjacency
    for _ in range(len(tokens).bit_length()):
        visible = (visible @ visible).clamp_(max=1.0)
    seen = visible.bool()
    depths = seen.sum(2) - 1
    words = (seen.long() << torch.arange(rows, device=device)).sum(2)
    row = torch.arange(rows, device=device)
    child = parents[:, None, :] == row[:, None]  # [B, parent, row]
    first = torch.where(child.any(2), child.int().argmax(2), -1)
    younger = (parents[:, :, None] == parents[:, None, :]) & (row[None, :] > row[:, None])
    younger &= (parents >= 0)[:, :, None]
    following = torch.where(younger.any(2), younger.int().argmax(2), -1)
    return {
        "tokens": torch.cat([roots[:, None], drafts], 1),
        "parents": parents,
        "positions": lens[:, None] + depths,
        "mask": words[:, :, None],
        "first_child": first,
        "next_sibling": following,
    }


def torch_greedy(
    tokens: torch.Tensor, targets: torch.Tensor, parents: torch.Tensor, depth: int
) -> Triple:
    batch, rows = tokens.shape
    above = parents.long().clamp(min=0)
    matches = (tokens == targets.gather(1, above)) & (parents >= 0)
    row = torch.zeros(batch, 1, dtype=torch.int64, device=tokens.device)
    path = torch.full((batch, rows), -1, dtype=torch.int64, device=tokens.device)
    counts = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    for step in range(depth):
        below = matches & (above == row)
        found = below.any(1)
        child = below.int().argmax(1)
        path[:, step] = torch.where(found & (counts == step), child, -1)
        counts += found & (counts == step)
        row = torch.where(found, child, row[:, 0])[:, None]
    return path, counts, targets.gather(1, row)[:, 0]


def torch_sampling(
    tokens: torch.Tensor,
    probs: torch.Tensor,
    first: torch.Tensor,
    following: torch.Tensor,
    coins: torch.Tensor,
    final: torch.Tensor,
    depth: int,
    width: int,
) -> Triple:
    batch, rows, _ = probs.shape
    device = tokens.device
    every = torch.arange(batch, device=device)
    row = torch.zeros(batch, dtype=torch.int64, device=device)
    path = torch.full((batch, rows), -1, dtype=torch.int64, device=device)
    counts = torch.zeros(batch, dtype=torch.int64, device=device)
    going = torch.ones(batch, dtype=torch.bool, device=device)
    first, following = first.long(), following.long()
    for step in range(depth):
        child = first[every, row]
        mass = torch.zeros(batch, dtype=torch.float64, device=device)
        accepted = torch.full((batch,), -1, device=device)
        for _ in range(width):
            there = going & (child >= 0) & (accepted < 0)
            token = tokens[every, child.clamp(min=0)]
            mass += torch.where(there, probs[every, row, token], 0.0)
            taken = there & (coins[:, step] < mass)
            accepted = torch.where(taken, child, accepted)
            child = torch.where(child >= 0, following[every, child.clamp(min=0)], -1)
        going &= accepted >= 0
        path[:, step] = torch.where(going, accepted, -1)
        counts += going
        row = torch.where(going, accepted, row)
    residual = probs[every, row].clone()
    child = first[every, row]
    for _ in range(width):
        token = tokens[every, child.clamp(min=0)]
        residual[every, token] *= (child < 0).float()
        child = torch.where(child >= 0, following[every, child.clamp(min=0)], -1)
    cumulative = residual.cumsum(1, dtype=torch.float64)
    place = final.double()[:, None] * cumulative[:, -1:]
    return path, counts, torch.searchsorted(cumulative, place, right=True)[:, 0]


def python_build(
    tokens: list[torch.Tensor],
    scores: list[torch.Tensor],
    kept: list[torch.Tensor],
    roots: torch.Tensor,
    lens: torch.Tensor,
    rows: int,
) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    k = tokens[0].shape[1]
    columns = [[part.tolist() for part in parts] for parts in (tokens, scores, kept)]
    trees = []
    for b, root in enumerate(roots.tolist()):
        flat_tokens = [token for step in columns[0] for token in step[b]]
        flat_scores = [score for step in columns[1] for score in step[b]]
        above = [-1] + [parent for step in columns[2] for parent in step[b]]
        order = sorted(range(len(flat_scores)), key=lambda i: (-flat_scores[i], i))
        chosen = sorted(order[: rows - 1])
        row_of = {candidate: row for row, candidate in enumerate(chosen, 1)}
        parents, masks, first, following = [-1], [1], [-1] * rows, [-1] * rows
        last: dict[int, int] = {}
        for row, candidate in enumerate(chosen, 1):
            slot = 0 if candidate < k else 1 + (candidate - k) // k
            parent = 0 if above[slot] < 0 else row_of[above[slot]]
            parents.append(parent)
            masks.append(masks[parent] | 1 << row)
            if parent in last:
                following[last[parent]] = row
            else:
                first[parent] = row
            last[parent] = row
        drafts = [root, *(flat_tokens[candidate] for candidate in chosen)]
        trees.append((drafts, parents, first, following))
    return trees


def python_greedy(
    tokens: torch.Tensor, targets: torch.Tensor, first: torch.Tensor, following: torch.Tensor
) -> list[tuple[list[int], int]]:
    given = zip(*(part.tolist() for part in (tokens, targets, first, following)), strict=True)
    outcomes = []
    for ids, wanted, children, siblings in given:
        path, row = [], 0
        child = children[0]
        while child >= 0:
            if ids[child] == wanted[row]:
                path.append(child)
                row, child = child, children[child]
            else:
                child = siblings[child]
        outcomes.append((path, wanted[row]))
    return outcomes


def python_sampling(
    tokens: torch.Tensor,
    probs: torch.Tensor,
    first: torch.Tensor,
    following: torch.Tensor,
    coins: torch.Tensor,
    final: torch.Tensor,
) -> list[tuple[list[int], int]]:
    given = zip(*(part.tolist() for part in (tokens, first, following, coins, final)), strict=True)
    outcomes = []
    for b, (ids, children, siblings, coin, last) in enumerate(given):
        path, row = [], 0
        while True:
            mass, seen, child = 0.0, set(), children[row]
            while child >= 0:
                if ids[child] not in seen:
                    seen.add(ids[child])
                    mass += probs[b, row, ids[child]].item()
                    if coin[len(path)] < mass:
                        break
                child = siblings[child]
            if child < 0:
                break
            path.append(child)
            row = child
        residual = probs[b, row].tolist()
        for token in seen:
            residual[token] = 0.0
        cumulative = list(accumulate(residual))
        outcomes.append((path, bisect_right(cumulative, last * cumulative[-1])))
    return outcomes
