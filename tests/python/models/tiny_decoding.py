"""Greedy decoding of one sequence, three ways: plain, with draft chains, with draft trees.

Plain decoding keeps K/V in growing tensors and uses torch's attention, so it shares nothing with
the other two. Those use the package: paged caches bound to an Interceptor and one round per step
(begin, write per layer, verify attention over the pages and the staged rows, greedy acceptance,
commit), watched by a ContractChecker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from nwor_specpv import ContractChecker, Interceptor, NworConfig, RoundPlan, verify_attention
from nwor_specpv.models.tiny_model import TinyModel

PAGE_SIZE = 16
# What ends a story: the model begins the next one.
BOS = 1


@dataclass
class NgramTree:
    """Tokens that may follow. `parents[i]` is a row of the step: 0 is the last emitted token."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add_branch(self, branch: list[int]) -> None:
        """Hangs a continuation on the root, sharing the rows that are there already."""
        parent = 0
        for token in branch:
            known = [
                row + 1
                for row, (t, p) in enumerate(zip(self.tokens, self.parents, strict=True))
                if t == token and p == parent
            ]
            if not known:
                self.tokens.append(token)
                self.parents.append(parent)
                known = [len(self.tokens)]
            parent = known[0]


def draft_by_ngrams(history: list[int], length: int, branches: int) -> NgramTree:
    """What followed the last tokens where they stood before: the newest matches first.

    Longer matches go before shorter ones; each distinct continuation becomes a branch.
    """
    tree = NgramTree()
    found: list[list[int]] = []
    for size in (3, 2, 1):
        tail = history[-size:]
        for start in range(len(history) - size - 1, -1, -1):
            if len(found) == branches:
                break
            if history[start : start + size] == tail:
                branch = history[start + size : start + size + length]
                if branch and not any(branch == known[: len(branch)] for known in found):
                    found.append(branch)
    for branch in found:
        tree.add_branch(branch)
    return tree


@dataclass
class DecodingRun:
    """What one way of decoding did."""

    tokens: list[int]
    steps: int
    stats: dict[str, object]
    violations: list[object]


def decode_plain(model: TinyModel, prompt: list[int], max_tokens: int) -> DecodingRun:
    """One token a step, attention over everything by torch."""
    shape = model.shape
    empty = torch.empty(0, shape.num_kv_heads, shape.head_dim)
    keys, values = [empty] * shape.num_layers, [empty] * shape.num_layers

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys[layer], values[layer] = (
            torch.cat((keys[layer], key)),
            torch.cat((values[layer], value)),
        )
        rows, length = query.shape[0], keys[layer].shape[0]
        visible = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[layer].transpose(0, 1)[None],
            values[layer].transpose(0, 1)[None],
            attn_mask=visible,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    tokens, fed, steps = list(prompt), 0, 0
    while len(tokens) < len(prompt) + max_tokens:
        rows = torch.tensor(tokens[fed:])
        logits = model.forward(rows, torch.arange(fed, len(tokens)), attend)
        fed = len(tokens)
        steps += 1
        tokens.append(int(logits[-1].argmax()))
        if tokens[-1] == BOS:
            break
    return DecodingRun(tokens[len(prompt) :], steps, {}, [])


class SpeculativeDecoder:
    """One sequence with its paged caches behind an interceptor."""

    def __init__(self, model: TinyModel) -> None:
        shape = model.shape
        self._model = model
        self._num_pages = shape.context // PAGE_SIZE
        sizes = (self._num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        # Poisoned: whatever reads a slot that was never written shows at once.
        self._keys = [torch.full(sizes, float("nan")) for _ in range(shape.num_layers)]
        self._values = [torch.full(sizes, float("nan")) for _ in range(shape.num_layers)]
        self._interceptor = Interceptor(NworConfig(strict=True))
        for layer in range(shape.num_layers):
            self._interceptor.bind_layer(str(layer), self._keys[layer], self._values[layer])
        self._checker = ContractChecker(self._interceptor)
        # Pages in a fixed but unordered way, as a real allocator would leave them.
        generator = torch.Generator().manual_seed(1)
        self._pages = torch.randperm(self._num_pages, generator=generator, dtype=torch.int32)
        self._violations: list[object] = []

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        return self._pages[positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE

    def _step(self, committed: int, rows: list[int], tree: NgramTree) -> list[int]:
        """Feeds `rows` at positions committed.. and the drafts below the last of them.

        Returns the tokens this step emits: the accepted drafts and the target's own next one.
        """
        root = len(rows) - 1
        parents = [root + parent for parent in tree.parents]
        depths = [0] * len(rows)
        for parent in parents:
            depths.append(depths[parent] + 1)
        positions = torch.tensor(
            [committed + i for i in range(len(rows))]
            + [committed + root + depth for depth in depths[len(rows) :]]
        )
        tokens = torch.tensor(rows + tree.tokens)
        mask = _ancestor_masks(len(rows), parents)
        # A draft has no slot before it is accepted: siblings stand at the same position.
        slots = self._slots(positions)
        slots[len(rows) :] = -1

        self._checker.snapshot()
        plan = RoundPlan([len(tokens)], [len(tree.tokens)], [parents] if parents else [])
        self._interceptor.begin(plan)
        block_table = self._pages[None]
        prefix = torch.tensor([committed], dtype=torch.int32)
        start = torch.tensor([0, len(tokens)], dtype=torch.int32)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            self._interceptor.write(str(layer), key, value, slots)
            caches = (self._keys[layer], self._values[layer])
            scale = query.shape[-1] ** -0.5
            return verify_attention(
                query, key, value, *caches, block_table, prefix, start, mask, scale
            )

        targets = self._model.forward(tokens, positions, attend).argmax(-1).tolist()
        self._violations += self._checker.verify_staged()

        accepted: list[int] = []
        row = root
        while True:
            below = [
                i
                for i, p in enumerate(parents, len(rows))
                if p == row and tokens[i] == targets[row]
            ]
            if not below:
                break
            row = below[0]
            accepted.append(row)
        emitted = [targets[root], *(targets[i] for i in accepted)]
        if BOS in emitted:
            emitted = emitted[: emitted.index(BOS) + 1]
            # Drafts are emitted tokens but for the last: what comes after the end is not committed.
            accepted = accepted[: len(emitted) - 1]
        path = torch.tensor([accepted or [-1]], dtype=torch.int32)
        counts = torch.tensor([len(accepted)], dtype=torch.int32)
        next_positions = committed + root + 1 + torch.arange(path.shape[1])
        destinations = self._slots(next_positions)[None]
        receipt = self._interceptor.commit(path, counts, destinations)
        self._violations += self._checker.verify(receipt, [len(accepted)])
        return emitted

    def decode(self, prompt: list[int], max_tokens: int, length: int, branches: int) -> DecodingRun:
        """Greedy decoding with drafts of up to `branches` continuations of `length` tokens."""
        tokens, committed, steps = list(prompt), 0, 0
        limit = len(prompt) + max_tokens
        while steps == 0 or (len(tokens) < limit and tokens[-1] != BOS):
            rows = tokens[committed:]
            room = min(length, limit - len(tokens) - 1)
            tree = draft_by_ngrams(tokens, room, branches) if room > 0 else NgramTree()
            emitted = self._step(committed, rows, tree)
            # Everything fed and every accepted draft is in the cache; the last token is not yet.
            committed = len(tokens) + len(emitted) - 1
            tokens += emitted
            steps += 1
        return DecodingRun(
            tokens[len(prompt) :], steps, self._interceptor.stats(), self._violations
        )


def _ancestor_masks(num_rows: int, parents: list[int]) -> torch.Tensor:
    """Bit j of row i: row j is visible. Fed rows form a chain, drafts see their ancestors."""
    bits = [(1 << (i + 1)) - 1 for i in range(num_rows)]
    for i, parent in enumerate(parents, num_rows):
        bits.append(bits[parent] | 1 << i)
    words = (len(bits) + 63) // 64
    signed = [
        [word - (1 << 64) if word >> 63 else word for word in _split(row, words)] for row in bits
    ]
    return torch.tensor(signed, dtype=torch.int64)


def _split(bits: int, words: int) -> list[int]:
    return [bits >> (64 * word) & ((1 << 64) - 1) for word in range(words)]
