"""One captured graph serves every mix of full, full + refresh and partial requests.

The step is captured once: views, write, refresh, attention, commit. Then requests go on for
many steps with other decisions, lengths, trees and acceptance each time; only buffers are
filled anew. K and queries are small integers, so that the blocks to be chosen are known exactly.
Without a GPU the same steps run without a graph.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nwor_specpv import (
    CompactViews,
    PartialStore,
    SpecPVConfig,
    VerifyPolicy,
    commit,
    pinned_cache,
    verify_attention,
    write_kv,
)
from tests.python.specpv.contexts import DEVICES, best, of_pages, scores_of, seeded

LAYERS, HEADS, KV_HEADS, DIM, PAGE = 2, 4, 2, 64, 16
BLOCK, SINK, RETRIEVED, WINDOW = 16, 1, 3, 1
MAX_ROWS, SLACK, MAX_TOKENS = 5, 6, 288
REQUESTS = 4
ROWS = REQUESTS * (MAX_ROWS + SLACK + MAX_ROWS)  # trees and the longest tails
DEPTH = MAX_ROWS - 1


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float()


class Step:
    """Buffers that stay where they are, and the step over them. The last place is padding."""

    def __init__(self, config: SpecPVConfig, device: str) -> None:
        self.device, self.config = device, config
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        places, pages = REQUESTS + 1, MAX_TOKENS // PAGE
        shape = (LAYERS, 2, REQUESTS * pages + 2, PAGE, KV_HEADS, DIM)
        make = pinned_cache if config.specpv_offload else torch.empty
        self.cache = make(shape, dtype=self.dtype, device=device)
        self.cache.zero_()
        self.keys, self.values = list(self.cache[:, 0]), list(self.cache[:, 1])
        self.store = PartialStore(
            config,
            self.keys,
            self.values,
            max_requests=places,
            max_tokens=MAX_TOKENS,
            max_rows=MAX_ROWS,
        )
        self.compact = None
        if config.specpv_storage == "compact":
            self.compact = CompactViews(self.store, self.keys, self.values)
        order = torch.randperm(REQUESTS * pages + 2)[: REQUESTS * pages]
        self.table = torch.zeros(places, pages, dtype=torch.int32)
        self.table[:REQUESTS] = order.reshape(REQUESTS, pages).int()
        self.table = self.table.to(device)

        def ints(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        def rows(heads: int) -> torch.Tensor:
            return torch.zeros(LAYERS, ROWS, heads, DIM, dtype=self.dtype, device=device)

        self.query, self.key, self.value = rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)
        self.staged, self.out = torch.stack([rows(KV_HEADS)] * 2), rows(HEADS)
        self.slots, self.stage_rows = ints(ROWS, dtype=torch.int64), ints(ROWS)
        self.start, self.prefix, self.tree = ints(places + 1), ints(places), ints(places, 2)
        self.path, self.counts = ints(places, DEPTH), ints(places)
        self.to, self.roots = (ints(places, DEPTH, dtype=torch.int64), ints(places).long())
        self.status = ints(8, dtype=torch.int64)
        self.graph: torch.cuda.CUDAGraph | None = None

    def enqueue(self) -> None:
        self.store.build_views(self.table)
        for layer in range(LAYERS):
            cache = self.keys[layer], self.values[layer]
            key, value = self.key[layer], self.value[layer]
            staged = self.staged[0, layer], self.staged[1, layer]
            write_kv(key, value, *cache, self.slots, self.stage_rows, *staged)
            query = self.query[layer][None].expand(REQUESTS + 1, -1, -1, -1)
            self.store.refresh_layer(layer, query, self.table, self.tree)
            verify_attention(
                self.query[layer],
                key,
                value,
                *cache,
                self.table,
                self.prefix,
                self.start,
                None,
                0.125,
                view=(self.compact or self.store).view(layer),
                out=self.out[layer],
            )
        commit(
            self.staged[0],
            self.staged[1],
            self.keys,
            self.values,
            self.path,
            self.counts,
            self.to,
            self.status,
            tail=None if self.compact is None else self.compact.tail(self.roots),
        )

    def run(self) -> None:
        if self.device == "cpu":
            self.enqueue()
            return
        if self.graph is None:
            self.enqueue()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.enqueue()
            return
        self.graph.replay()
        self.store.mark_refreshed()


class Request:
    def __init__(self, step: Step, place: int, length: int) -> None:
        self.step, self.place = step, place
        self.cache = step.store.open(length)
        self.cache.prefill(length)
        kv = [whole(length, KV_HEADS, DIM) for _ in range(2 * LAYERS)]
        self.kv = kv  # every token's K and V, layer by layer, as this test knows them
        for token in range(length):
            slot = self.slot(token)
            for layer in range(LAYERS):
                for side in range(2):
                    row = kv[2 * layer + side][token].to(step.dtype)
                    step.cache[layer, side, slot // PAGE, slot % PAGE] = row
        self.chosen: list[list[list[int]]] | None = None  # blocks by layer and head

    def slot(self, token: int) -> int:
        return int(self.step.table[self.place, token // PAGE]) * PAGE + token % PAGE

    def seen(self, layer: int, head: int) -> list[int]:
        """Tokens of the context that the step's rows see."""
        decision = self.decision
        if decision.kind != "partial":
            return list(range(decision.prefix_len))
        window = max(SINK, self.cache.anchor_len // BLOCK - WINDOW)
        blocks = [*range(SINK), *(SINK + i for i in self.chosen[layer][head] if i >= 0)]
        tokens = [t for b in blocks for t in range(b * BLOCK, (b + 1) * BLOCK)]
        return tokens + list(range(window * BLOCK, decision.committed_len))


def fill(step: Step, requests: list[Request], rng: random.Random, policy: VerifyPolicy) -> None:
    """Decides, and puts a new step's numbers into the buffers."""
    slots, stage, starts, prefix, tree = [], [], [0], [], []
    path, counts, to, roots = [], [], [], []
    batch = []
    for request in requests:
        num_rows = rng.randrange(1, MAX_ROWS + 1)
        decision = request.decision = policy.decide(request.cache, num_rows)
        request.accepted = rng.randrange(num_rows)
        batch.append((request.cache, decision))
        first, refed = decision.committed_len - decision.refed_rows, decision.refed_rows
        for i in range(refed + num_rows):
            slots.append(request.slot(first + i) if i <= refed else -1)
            stage.append(len(stage))
        begin = starts[-1]
        starts.append(begin + refed + num_rows)
        prefix.append(decision.prefix_len)
        tree.append([begin + refed, starts[-1]])
        rows = list(range(begin + refed + 1, begin + refed + 1 + request.accepted))
        path.append(rows + [-1] * (DEPTH - len(rows)))
        counts.append(len(rows))
        after = [request.slot(decision.committed_len + 1 + i) for i in range(len(rows))]
        to.append(after + [-1] * (DEPTH - len(rows)))
        roots.append(request.slot(decision.committed_len))
    padding = ROWS - len(slots)
    told = {
        "slots": slots + [-1] * padding,
        "stage_rows": stage + [-1] * padding,
        "start": [*starts, ROWS],
        "prefix": [*prefix, 0],
        "tree": [*tree, [0, 0]],
        "path": [*path, [-1] * DEPTH],
        "counts": [*counts, 0],
        "to": [*to, [-1] * DEPTH],
        "roots": [*roots, -1],
    }
    for name, values in told.items():
        getattr(step, name).copy_(torch.tensor(values))
    step.starts = starts
    for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS)):
        getattr(step, name).copy_(whole(LAYERS, ROWS, heads, DIM))
    step.out.fill_(float("nan"))
    step.store.begin(batch)
    if step.compact is not None:
        step.store.build_views(step.table)
        step.compact.update(batch)


def check_attention(step: Step, request: Request, layer: int) -> None:
    begin, end = step.starts[request.place], step.starts[request.place + 1]
    query = step.query[layer, begin:end].double().cpu()
    key, value = (t[layer, begin:end].double().cpu() for t in (step.key, step.value))
    rows = end - begin
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        seen = request.seen(layer, of)
        assert seen == sorted(set(seen))
        keys = torch.cat([request.kv[2 * layer][seen, of].double(), key[:, of]])
        values = torch.cat([request.kv[2 * layer + 1][seen, of].double(), value[:, of]])
        mask = torch.cat([torch.ones(rows, len(seen), dtype=torch.bool), causal], 1)
        scores = (query[:, head] @ keys.T * 0.125).masked_fill(~mask, -torch.inf)
        wanted = scores.softmax(-1) @ values
        error = (step.out[layer, begin:end, head].double().cpu() - wanted).abs().max()
        assert error < (1e-4 if step.device == "cpu" else 0.03), (request.decision, error)


def check_refresh(step: Step, request: Request, score: str) -> None:
    """Summaries of all that was committed before the step, and the blocks its tree chooses."""
    begin, end = step.tree[request.place].tolist()
    anchor = request.decision.committed_len
    blocks = max(0, anchor // BLOCK - WINDOW - SINK)
    request.chosen = []
    for layer in range(LAYERS):
        tokens = request.kv[2 * layer][SINK * BLOCK : (SINK + blocks) * BLOCK]
        by_block = tokens.reshape(blocks, BLOCK, KV_HEADS, DIM)
        kmax, kmin = by_block.amax(1), by_block.amin(1)
        for kept, wanted in ((step.store.kmax, kmax), (step.store.kmin, kmin)):
            found = of_pages(kept[layer], step.table[request.place], SINK, blocks)
            assert torch.equal(found.float().cpu(), wanted)
        query = step.query[layer, begin:end].double().cpu().numpy()
        scores = scores_of(query, kmax.numpy(), kmin.numpy(), score, "mean", "mean")
        exact = np.rint(scores * (end - begin) * (HEADS // KV_HEADS))
        request.chosen.append([best(row, RETRIEVED) for row in exact])
    assert step.store.ids[:, request.cache.row].tolist() == request.chosen


def learn(step: Step, request: Request) -> None:
    """What the cache is to hold after the step: re-fed rows anew, the root, accepted rows."""
    decision, begin = request.decision, step.starts[request.place]
    first = decision.committed_len - decision.refed_rows
    rows = range(begin, begin + decision.refed_rows + 1 + request.accepted)
    for layer in range(LAYERS):
        for side, source in enumerate((step.key, step.value)):
            old = request.kv[2 * layer + side][:first]
            request.kv[2 * layer + side] = torch.cat([old, source[layer, rows].float().cpu()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", ["paged", "compact", "offload"])
def test_one_graph_serves_every_mix_of_decisions(device: str, storage: str) -> None:
    rng = seeded()
    config = SpecPVConfig(
        enable_specpv=True,
        specpv_block_size=BLOCK,
        specpv_n_sink_blocks=SINK,
        specpv_n_retrieval_blocks=RETRIEVED,
        specpv_n_window_blocks=WINDOW,
        specpv_n_spec_tokens_buf=SLACK,
        specpv_storage="paged" if storage == "paged" else "compact",
        specpv_offload=storage == "offload",
        specpv_selector=rng.choice(["specpv", "quest"]) if SINK == 0 else "specpv",
        specpv_score=rng.choice(["specpv", "quest"]),
    )
    policy = VerifyPolicy(config, lambda cache: rng.random() < 0.1)
    step = Step(config, device)
    lengths = [60, 130, 150, 199]  # the first is seen whole for a while
    requests = [Request(step, place, length) for place, length in enumerate(lengths)]
    mixes = set()
    for _ in range(14):
        fill(step, requests, rng, policy)
        step.run()
        assert step.status[0] == 0, step.status.tolist()
        mixes.add(tuple(sorted(request.decision.kind for request in requests)))
        for request in requests:
            for layer in range(LAYERS):
                check_attention(step, request, layer)
            learn(step, request)
            if request.decision.kind == "full_refresh":
                check_refresh(step, request, config.specpv_score)
            assert request.cache.finish(request.decision, request.accepted).emitted > 0
            assert request.cache.committed_len == len(request.kv[0])
    kinds = {kind for mix in mixes for kind in mix}
    assert kinds == {"full", "full_refresh", "partial"}
    assert sum(len(set(mix)) > 1 for mix in mixes) > 1, mixes
    for request in requests:
        for token in range(len(request.kv[0])):
            at = request.slot(token) // PAGE, request.slot(token) % PAGE
            for layer in range(LAYERS):
                for side in range(2):
                    row = step.cache[(layer, side, *at)].float().cpu()
                    assert torch.equal(row, request.kv[2 * layer + side][token])
