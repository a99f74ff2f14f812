"""A small transformer in float32 with paged K/V, and a host that decodes with it.

The host is written from the specification, apart from the library's own hosts: chains of drafts,
`write_kv`, `verify_attention` over views, `commit`, the policy and the store.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nwor_specpv import (
    CompactViews,
    PartialStore,
    SpecPVConfig,
    StepDecision,
    VerifyPolicy,
    commit,
    verify_attention,
    write_kv,
)

HEADS, KV_HEADS, DIM, LAYERS, VOCAB, PAGE = 4, 2, 16, 2, 29, 8


class Weights:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) / math.sqrt(rows)

        width = HEADS * DIM
        self.embedding = matrix(VOCAB, width) * 8
        self.query = [matrix(width, width) * 2 for _ in range(LAYERS)]
        self.key = [matrix(width, KV_HEADS * DIM) * 2 for _ in range(LAYERS)]
        self.value = [matrix(width, KV_HEADS * DIM) for _ in range(LAYERS)]
        self.out = [matrix(width, width) for _ in range(LAYERS)]
        self.head = matrix(width, VOCAB)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = DIM // 2
    angles = positions[:, None] * 50.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def forward(w: Weights, tokens: list[int], positions: list[int], attend: Attend) -> torch.Tensor:
    """Logits [rows, VOCAB]; attend(layer, q, k, v) is all that looks at other tokens."""
    at = torch.tensor(positions, dtype=torch.float32)
    x = w.embedding[torch.tensor(tokens, dtype=torch.long)]
    for layer in range(LAYERS):
        q = rotate((x @ w.query[layer]).reshape(-1, HEADS, DIM), at)
        k = rotate((x @ w.key[layer]).reshape(-1, KV_HEADS, DIM), at)
        v = (x @ w.value[layer]).reshape(-1, KV_HEADS, DIM)
        x = x + attend(layer, q, k, v).reshape(-1, HEADS * DIM) @ w.out[layer]
        x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    return x @ w.head * 3


def plain_kv(w: Weights, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, K and V [LAYERS, tokens, ...] of one causal pass over everything."""
    keys, values = [], []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys.append(k)
        values.append(v)
        group = HEADS // KV_HEADS
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / math.sqrt(DIM)
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))

    logits = forward(w, tokens, list(range(len(tokens))), attend)
    return logits, torch.stack(keys), torch.stack(values)


def decode_plainly(w: Weights, prompt: list[int], count: int) -> list[int]:
    """Greedy, one token a step, K and V kept in plain lists."""
    logits, keys, values = plain_kv(w, prompt)
    kept = [list(rows) for rows in (keys, values)]
    tokens = list(prompt)
    group = HEADS // KV_HEADS

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for side, row in zip(kept, (k, v), strict=True):
            side[layer] = torch.cat([side[layer], row])
        keys, values = (side[layer].repeat_interleave(group, 1) for side in kept)
        weights = (torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(DIM)).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits = forward(w, tokens[-1:], [len(tokens) - 1], attend)
    return tokens[len(prompt) :]


@dataclass
class Request:
    tokens: list[int]  # committed, then the root that is not in the cache yet
    prompt: int
    shown: int
    cache: object
    pages: list[int]
    decision: StepDecision | None = None
    drafts: list[int] | None = None


class Host:
    """Decodes a batch of requests with chains of drafts."""

    def __init__(self, w: Weights, config: SpecPVConfig, requests: int, max_tokens: int) -> None:
        self.w, self.config, self.max_tokens = w, config, max_tokens
        per_request = -(-max_tokens // PAGE)
        self.num_pages = requests * per_request + 3
        shape = (LAYERS, self.num_pages, PAGE, KV_HEADS, DIM)
        self.keys, self.values = torch.full((2, *shape), float("nan")).unbind(0)
        self.policy = VerifyPolicy(config)
        self.max_rows = 5
        self.store = PartialStore(
            config,
            list(self.keys),
            list(self.values),
            max_requests=requests,
            max_tokens=max_tokens,
            max_rows=self.max_rows,
        )
        self.compact: CompactViews | None = None
        if config.specpv_storage == "compact":
            self.compact = CompactViews(self.store, list(self.keys), list(self.values))
        self.free = torch.randperm(self.num_pages).tolist()
        self.requests: list[Request] = []
        self.kinds: dict[str, int] = {}
        self.triggers: dict[str, int] = {}
        self.refusals = 0  # commits that had no room in a compact view
        self.may_refuse = False
        self.after_step: Callable[[Host, Request], None] = lambda host, request: None

    def add(self, prompt: list[int], new_tokens: int) -> Request:
        pages = [self.free.pop() for _ in range(-(-self.max_tokens // PAGE))]
        _, keys, values = plain_kv(self.w, prompt[:-1])
        for position in range(len(prompt) - 1):
            at = pages[position // PAGE], position % PAGE
            self.keys[(slice(None), *at)] = keys[:, position]
            self.values[(slice(None), *at)] = values[:, position]
        cache = self.store.open(len(prompt), new_tokens)
        assert cache is not None
        cache.prefill(len(prompt) - 1)
        request = Request(list(prompt), len(prompt), len(prompt), cache, pages)
        self.requests.append(request)
        return request

    def slot(self, request: Request, position: int) -> int:
        return request.pages[position // PAGE] * PAGE + position % PAGE

    def step(self, drafts: list[list[int]]) -> None:
        """One step of all requests, each with its chain of drafts."""
        batch, rows, positions, slots, staged, starts = [], [], [], [], [], [0]
        for request, chain in zip(self.requests, drafts, strict=True):
            cache = request.cache
            decision = self.policy.decide(cache, 1 + len(chain))
            request.decision, request.drafts = decision, chain
            self.kinds[decision.kind] = self.kinds.get(decision.kind, 0) + 1
            self.triggers[decision.trigger] = self.triggers.get(decision.trigger, 0) + 1
            batch.append((cache, decision))
            first = decision.committed_len - decision.refed_rows
            fed = request.tokens[first : decision.committed_len + 1] + chain
            for i, token in enumerate(fed):
                rows.append(token)
                positions.append(first + i)
                is_draft = i > decision.refed_rows
                slots.append(-1 if is_draft else self.slot(request, first + i))
                staged.append(len(staged))
            starts.append(len(rows))
        table = torch.tensor([r.pages for r in self.requests], dtype=torch.int32)
        prefix = torch.tensor([r.decision.prefix_len for r in self.requests], dtype=torch.int32)
        start = torch.tensor(starts, dtype=torch.int32)
        slot_mapping = torch.tensor(slots)
        stage_rows = torch.tensor(staged, dtype=torch.int32)
        staging = torch.full((2, LAYERS, len(rows), KV_HEADS, DIM), float("nan"))
        tree = torch.tensor(
            [
                [a + r.decision.refed_rows, b]
                for r, a, b in zip(self.requests, starts, starts[1:], strict=False)
            ],
            dtype=torch.int32,
        )
        self.store.begin(batch)
        self.store.build_views(table)
        if self.compact is not None:
            self.compact.update(batch)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = self.keys[layer], self.values[layer]
            write_kv(k, v, *cache, slot_mapping, stage_rows, staging[0, layer], staging[1, layer])
            packed = q[None].expand(len(self.requests), -1, -1, -1)
            self.refresh(layer, packed, table, tree)
            view = (self.compact or self.store).view(layer)
            scale = 1 / math.sqrt(DIM)
            return verify_attention(q, k, v, *cache, table, prefix, start, None, scale, view=view)

        logits = forward(self.w, rows, positions, attend)
        self.accept(logits.argmax(-1).tolist(), starts, staging)

    def refresh(self, layer: int, *given: torch.Tensor) -> None:
        self.store.refresh_layer(layer, *given)

    def accept(self, chosen: list[int], starts: list[int], staging: torch.Tensor) -> None:
        lossless = self.config.specpv_mode == "lossless"
        paths, slots, counts, outcomes, roots = [], [], [], [], []
        for request, first in zip(self.requests, starts, strict=False):
            decision = request.decision
            refed = decision.refed_rows
            begin = decision.committed_len - refed
            fed = request.tokens[begin : decision.committed_len + 1] + request.drafts
            answers = chosen[first : first + len(fed)]
            differ = sum(a != t for a, t in zip(answers[:refed], fed[1 : refed + 1], strict=True))
            at = 0 if lossless and decision.kind == "full_refresh" else refed
            accepted = 0
            while at + 1 < len(fed) and answers[at] == fed[at + 1]:
                at += 1
                accepted += 1
            # Rows behind the root are staged; the root and re-fed rows are in the cache already.
            path = list(range(first + refed + 1, first + at + 1))
            paths.append(path)
            slots.append([self.slot(request, begin + i) for i in range(refed + 1, at + 1)])
            counts.append(len(path))
            roots.append(self.slot(request, decision.committed_len))
            tokens = request.tokens[:begin] + fed[: at + 1] + [answers[at]]
            differ = -1 if lossless else differ  # acceptance itself tells
            outcomes.append((request, decision, accepted, differ, tokens))
        depth = max(1, max(counts))
        status = torch.zeros(8, dtype=torch.int64)
        commit(
            staging[0],
            staging[1],
            list(self.keys),
            list(self.values),
            torch.tensor([p + [-1] * (depth - len(p)) for p in paths], dtype=torch.int32),
            torch.tensor(counts, dtype=torch.int32),
            torch.tensor([s + [-1] * (depth - len(s)) for s in slots]),
            status,
            tail=None if self.compact is None else self.compact.tail(torch.tensor(roots)),
        )
        if status[0] != 0:  # nothing was committed: the step is made again, over everything
            assert self.may_refuse, status.tolist()
            self.refusals += 1
            for request in self.requests:
                request.cache.require_full("tail_overflow")
            return
        for request, decision, accepted, differ, tokens in outcomes:
            outcome = request.cache.finish(decision, accepted, differ)
            request.tokens = tokens
            assert request.cache.committed_len == len(tokens) - 1
            if outcome.emitted:
                request.shown = len(tokens)
            self.after_step(self, request)

    def decode(self, count: int, rng: random.Random) -> list[list[int]]:
        """Until every request has shown `count` new tokens; drafts are right every other time."""
        truth = [decode_plainly(self.w, r.tokens, count + 12) for r in self.requests]
        while any(r.shown - r.prompt < count for r in self.requests):
            drafts = []
            for request, right in zip(self.requests, truth, strict=True):
                done = len(request.tokens) - request.prompt
                chain = right[done : done + rng.randrange(0, self.max_rows)]
                drafts.append([t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in chain])
            self.step(drafts)
        return [r.tokens[r.prompt : r.shown][:count] for r in self.requests]
