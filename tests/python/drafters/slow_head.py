"""An EAGLE3 head in float64, an entry at a time, with loops: what the fast ones must agree with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from nwor_specpv.drafters.eagle3_head import Eagle3Head


class SlowHead:
    """Entries are given one by one; each attends to the last `window` of them."""

    def __init__(self, head: Eagle3Head, embedding: torch.Tensor, more: Sequence[int] = ()) -> None:
        """`more`: tokens that can be guessed besides the draft vocabulary."""
        self.shape = head.shape
        self.weights = {name: w.detach().double() for name, w in head.weights.items()}
        self.embedding = embedding.detach().double()
        self.ids = [*head.draft_to_target.tolist(), *more]
        self.output = self.embedding[self.ids]
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def fork(self) -> SlowHead:
        other = object.__new__(SlowHead)
        other.__dict__ = {**self.__dict__, "keys": [*self.keys], "values": [*self.values]}
        return other

    def target_entry(self, features: torch.Tensor, token: int) -> torch.Tensor:
        """An entry with the target's features; its output."""
        norms = self.weights["feature_norm"]
        parts = features.double().view(norms.shape)
        normed = [self._norm(part, weight) for part, weight in zip(parts, norms, strict=True)]
        return self.entry(self.weights["fuse"] @ torch.cat(normed), token)

    def entry(self, hidden: torch.Tensor, token: int) -> torch.Tensor:
        shape, weights = self.shape, self.weights
        both = torch.cat(
            [
                self._norm(self.embedding[token], weights["token_norm"]),
                self._norm(hidden, weights["hidden_norm"]),
            ]
        )
        query, key, value = (weights["query_key_value"] @ both).split(
            [shape.query_size, shape.kv_size, shape.kv_size]
        )
        position = len(self.keys)
        self.keys.append(self._turned(key.view(-1, shape.head_dim), position))
        self.values.append(value.view(-1, shape.head_dim))
        query = self._turned(query.view(-1, shape.head_dim), position)
        attended = []
        for index in range(shape.num_heads):
            kv = index * shape.num_kv_heads // shape.num_heads
            scores = torch.stack([query[index] @ key[kv] for key in self.keys])
            shares = (scores / math.sqrt(shape.head_dim)).softmax(0)
            attended.append(sum(s * v[kv] for s, v in zip(shares, self.values, strict=True)))
        hidden = hidden + weights["attention_output"] @ torch.cat(attended)
        gate, up = (weights["gate_up"] @ self._norm(hidden, weights["mlp_norm"])).chunk(2)
        return hidden + weights["down"] @ (gate * torch.sigmoid(gate) * up)

    def normalized(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, self.weights["norm"])

    def logarithms(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the draft vocabulary's probabilities after an entry with this output."""
        return (self.output @ self.normalized(hidden)).log_softmax(0)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + self.shape.norm_epsilon).sqrt() * weight

    def _turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.shape.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = position * self.shape.rope_theta ** (-2 * i / self.shape.head_dim)
            cos, sin = math.cos(angle), math.sin(angle)
            out[:, i] = x[:, i] * cos - x[:, i + half] * sin
            out[:, i + half] = x[:, i + half] * cos + x[:, i] * sin
        return out


def slow_tree(
    head: Eagle3Head,
    embedding: torch.Tensor,
    features: torch.Tensor,
    tokens: Sequence[int],
    sizes: tuple[int, int, int],
    seen: Iterable[int] = (),
) -> dict[tuple[int, ...], float]:
    """Paths below the root and their logarithms: the best rows - 1 of depth x top_k growth.

    `features` [n, ..] and `tokens` [n] are all entries; the head looks at the window's last ones.
    `seen` are all tokens of the text, which can be guessed besides the draft vocabulary.
    """
    rows, depth, width = sizes
    common = set(head.draft_to_target.tolist())
    slow = SlowHead(head, embedding, sorted(set(seen) - common))
    hidden = None
    for part, token in list(zip(features, tokens, strict=True))[-head.shape.window :]:
        hidden = slow.target_entry(part, int(token))
    kept = [((), 0.0, hidden, slow)]
    found: dict[tuple[int, ...], float] = {}
    for level in range(depth):
        grown = []
        for path, score, output, state in kept:
            if level:
                state = state.fork()
                output = state.entry(output, path[-1])
            chances = state.logarithms(output)
            best = chances.topk(width)
            for chance, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown.append(((*path, slow.ids[index]), score + chance, output, state))
        found |= {path: score for path, score, _, _ in grown}
        kept = sorted(grown, key=lambda one: -one[1])[:width]
    best_first = sorted(found.items(), key=lambda item: -item[1])
    return dict(best_first[: rows - 1])
