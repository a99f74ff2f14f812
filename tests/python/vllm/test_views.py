"""Views, tails and partial passes for vLLM, against slow references; no vLLM needed."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import LAYOUTS, Metrics, PartialView, SpecPVConfig
from nwor_specpv.errors import NworError
from nwor_specpv.vllm import versions
from nwor_specpv.vllm.backend.caches import key_value_of, plain_query
from nwor_specpv.vllm.specpv.drift import DriftProbe
from nwor_specpv.vllm.specpv.partial_pass import PartialPass
from nwor_specpv.vllm.specpv.refresh import RefreshViews
from nwor_specpv.vllm.specpv.tail import Tail
from nwor_specpv.vllm.specpv.views import ViewBatch, ViewStore
from tests.python.specpv.contexts import of_pages

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))

BLOCK, PAGE, LAYERS, HEADS, QUERY_HEADS, DIM = 4, 8, 2, 2, 4, 16
SINK, CHOSEN, WINDOW = 1, 3, 2


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    random.seed(SEED)


def config(**keys: Any) -> SpecPVConfig:
    return SpecPVConfig(
        **{
            "enable_specpv": True,
            "specpv_mode": "lossless",
            "specpv_block_size": BLOCK,
            "specpv_n_sink_blocks": SINK,
            "specpv_n_retrieval_blocks": CHOSEN,
            "specpv_n_window_blocks": WINDOW,
        }
        | keys
    )


class PagedRequests:
    """Packed caches as vLLM has them, and requests with shuffled pages.

    `scales`: of K and V, whose caches are float8 then; vLLM calls their codes bytes.
    """

    def __init__(
        self, requests: int, tokens: int, scales: tuple[float, float] | None = None
    ) -> None:
        pages = -(-tokens // PAGE)
        assert {known.cache_layout for known in versions.ADAPTERS} <= set(LAYOUTS)
        self.caches = [
            torch.randn(requests * pages + 1, HEADS, PAGE, 2 * DIM) for _ in range(LAYERS)
        ]
        self.layer = SimpleNamespace()
        self.scales = (1.0, 1.0)
        held = self.caches
        if scales is not None:
            self.scales = scales
            named = zip(("_k_scale", "_v_scale", "_q_scale"), (*scales, 2.0), strict=True)
            self.layer = SimpleNamespace(**{name: torch.tensor(x) for name, x in named})
            held = [cache.to(torch.float8_e4m3fn) for cache in self.caches]
            self.caches = [cache.view(torch.uint8) for cache in held]
        self.key_caches, self._value_caches = zip(*map(key_value_of, held), strict=True)
        order = torch.randperm(requests * pages).int() + 1
        self.table = order.view(requests, pages).contiguous()

    def keys(self, layer: int, request: int, length: int) -> torch.Tensor:
        """[tokens, heads, channels] in token order."""
        return self._read(self.key_caches[layer], request, length) * self.scales[0]

    def values(self, layer: int, request: int, length: int) -> torch.Tensor:
        return self._read(self._value_caches[layer], request, length) * self.scales[1]

    def _read(self, cache: torch.Tensor, request: int, length: int) -> torch.Tensor:
        pages = cache.contiguous().view(cache.dtype).float()[self.table[request].long()]
        return pages.flatten(0, 1)[:length]

    def store(self, max_requests: int, **keys: Any) -> ViewStore:
        return ViewStore(
            config(**keys),
            self.key_caches,
            max_requests=max_requests,
            max_batch=8,
            max_tokens=self.table.shape[1] * PAGE,
            max_rows=9,
            key_scales=[self.layer._k_scale] * LAYERS if self.scales != (1.0, 1.0) else (),
            dtype=torch.float32,
        )


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def wanted_tokens(
    engine: PagedRequests, layer: int, request: int, length: int, query: torch.Tensor, head: int
) -> list[int]:
    """Tokens a head sees: sink, the best blocks by max(q . kmax, q . kmin), window and the rest."""
    keys = engine.keys(layer, request, length).double()
    begin = max(length // BLOCK - WINDOW, SINK)
    group = QUERY_HEADS // HEADS
    scores = []
    for block in range(SINK, begin):
        span = keys[block * BLOCK : (block + 1) * BLOCK, head]
        high, low = span.amax(0), span.amin(0)
        rows = query[:, head * group : (head + 1) * group].double()
        scores.append((torch.maximum(rows @ high, rows @ low).mean().item(), -block))
    best = sorted(-block for _, block in sorted(scores, reverse=True)[:CHOSEN])
    blocks = [*range(min(SINK, begin)), *best]
    tokens = [block * BLOCK + i for block in blocks for i in range(BLOCK)]
    return tokens + list(range(begin * BLOCK, length))


def seen_tokens(engine: PagedRequests, view: PartialView, request: int, head: int) -> list[int]:
    """Tokens of the request that a view lists, by where they lie in the cache."""
    parts = PAGE // BLOCK
    where = {int(page): number for number, page in enumerate(engine.table[request])}
    tokens = []
    for block in view.blocks[request, head, : int(view.num_blocks[request])].tolist():
        first = where[block // parts] * PAGE + block % parts * BLOCK
        tokens += range(first, first + BLOCK)
    return tokens[: int(view.view_lens[request])]


def test_growing_requests_see_what_a_scan_would_choose() -> None:
    engine = PagedRequests(requests=3, tokens=200)
    store = engine.store(max_requests=5)
    rows = [store.open() for _ in range(3)]
    lens = [random.randint(30, 60) for _ in range(3)]
    for _ in range(6):
        batch = ViewBatch(engine.table, ints(rows), ints(lens), ints([1, 1, 1]))
        store.begin(batch)
        for layer in range(LAYERS):
            query = torch.randn(3, 4, QUERY_HEADS, DIM)
            used = [random.randint(1, 4) for _ in range(3)]
            store.refresh_layer(layer, query, ints([[0, n] for n in used]))
            store.build(3, layer)
            view = store.view(layer, 3)
            for request, length in enumerate(lens):
                blocks = max(length // BLOCK - WINDOW, SINK) - SINK
                keys = engine.keys(layer, request, length)[SINK * BLOCK :][: blocks * BLOCK]
                spans = keys.unflatten(0, (blocks, BLOCK))
                for kept, wanted in ((store.kmax, spans.amax(1)), (store.kmin, spans.amin(1))):
                    found = of_pages(kept[layer], engine.table[request], SINK, blocks)
                    assert torch.equal(found, wanted)
                for head in range(HEADS):
                    got = seen_tokens(engine, view, request, head)
                    chosen = query[request, : used[request]]
                    assert got == wanted_tokens(engine, layer, request, length, chosen, head)
        store.end(3)
        lens = [length + random.randint(0, 20) for length in lens]


def test_what_failed_is_summarised_again_and_rows_start_afresh() -> None:
    engine = PagedRequests(requests=2, tokens=120)
    store = engine.store(max_requests=1)
    row = store.open()
    assert row == 0
    assert store.open() is None
    batch = ViewBatch(engine.table[:1], ints([row]), ints([80]), ints([1]))
    store.begin(batch)
    store.refresh_layer(0, torch.randn(1, 1, QUERY_HEADS, DIM))  # layer 1 never comes: no end
    assert store._done.tolist() == [0, 0]
    store.begin(batch)
    for layer in range(LAYERS):
        store.refresh_layer(layer, torch.randn(1, 1, QUERY_HEADS, DIM))
    store.end(1)
    blocks = 80 // BLOCK - WINDOW - SINK
    assert store._done[0] == blocks
    assert store.anchors[0] == 80
    store.close(row)
    # Another request in the same row must not inherit how much is summarised.
    assert store.open() == 0
    store.begin(ViewBatch(engine.table[1:], ints([0]), ints([60]), ints([1])))
    store.refresh_layer(0, torch.randn(1, 1, QUERY_HEADS, DIM))
    blocks = 60 // BLOCK - WINDOW - SINK
    keys = engine.keys(0, 1, 60)[SINK * BLOCK :][: blocks * BLOCK].unflatten(0, (blocks, BLOCK))
    assert torch.equal(of_pages(store.kmax[0], engine.table[1], SINK, blocks), keys.amax(1))


def test_requests_without_a_row_or_a_view_see_everything() -> None:
    engine = PagedRequests(requests=3, tokens=120)
    store = engine.store(max_requests=2)
    rows, lens = [store.open(), -1, store.open()], ints([80, 90, 100])
    store.begin(ViewBatch(engine.table, ints(rows), lens, ints([1, 1, 1])), ints([1, 1, 0]))
    for layer in range(LAYERS):
        store.refresh_layer(layer, torch.randn(3, 2, QUERY_HEADS, DIM))
    store.build(3)
    assert (store.num_blocks[:3] >= 0).tolist() == [True, False, False]
    store.end(3)
    assert store.anchors[: store.max_requests].tolist() in ([80, 100], [100, 80])


def test_budgets_that_do_not_fit_are_refused() -> None:
    engine = PagedRequests(requests=1, tokens=60)
    with pytest.raises(NworError, match="expected a view shorter than the longest context"):
        engine.store(1, specpv_n_retrieval_blocks=100)
    with pytest.raises(NworError, match="expected a divisor of the page size"):
        engine.store(1, specpv_block_size=5)


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row [Hq, D] over [tokens, Hkv, D], float64."""
    group = QUERY_HEADS // HEADS
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    weights = torch.einsum("hd,thd->ht", query.double(), keys).mul(DIM**-0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values)


def test_scales_of_quantised_queries_may_be_those_of_kv_heads() -> None:
    codes = torch.randn(3, 4, 8).to(torch.float8_e4m3fn)
    values = codes.float()

    def plain(scale: float | list[float]) -> torch.Tensor:
        return plain_query(SimpleNamespace(_q_scale=torch.tensor(scale)), codes, torch.float32)

    assert torch.equal(plain(2.0), 2 * values)
    wanted = values * torch.tensor([2.0, 2.0, 0.5, 0.5])[:, None]
    assert torch.equal(plain([2.0, 0.5]), wanted)


@pytest.mark.parametrize("scales", [None, (0.5, 0.25)], ids=["float32", "float8"])
def test_passes_see_view_tail_and_one_another_and_write_the_tail_alone(
    scales: tuple[float, float] | None,
) -> None:
    engine = PagedRequests(requests=2, tokens=160, scales=scales)
    held = [cache.clone() for cache in engine.caches]
    store = engine.store(max_requests=2)
    tail = Tail(engine.key_caches, 8, 20, torch.float32)
    lens = [101, 77]
    rows = ints([store.open(), store.open()])
    store.begin(ViewBatch(engine.table, rows, ints(lens), ints([1, 1])))
    names = [f"layer.{number}" for number in range(LAYERS)]
    kept = [0, 0]
    seen: dict[tuple[int, int, int], list[int]] = {}  # layer, request, head: tokens of the view
    past: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for number in range(4):
        num_rows = random.randint(1, 4)
        takes = [random.randint(1, num_rows) for _ in range(2)]  # rows that are kept
        slots = [
            tail.slot(b, kept[b] + j) if j < takes[b] else -1
            for b in range(2)
            for j in range(num_rows)
        ]
        passed = PartialPass(
            store=store,
            tail=tail,
            layer_index={name: layer for layer, name in enumerate(names)},
            block_table=engine.table,
            prefix_lens=ints(lens),
            tail_lens=ints(kept),
            query_start=ints([0, num_rows, 2 * num_rows]),
            slots=torch.tensor(slots),
            num_rows=num_rows,
            has_tail=number > 0,
            select=number == 0,
        )
        for layer, name in enumerate(names):
            query = torch.randn(2 * num_rows, QUERY_HEADS, DIM)
            key, value = torch.randn(2, 2 * num_rows, HEADS, DIM)
            output = torch.full((2 * num_rows + 3, QUERY_HEADS, DIM), torch.nan)
            impl = SimpleNamespace(scale=DIM**-0.5, logits_soft_cap=0.0)
            where = SimpleNamespace(layer_name=name, **vars(engine.layer))
            given = query
            if scales is not None:  # vLLM quantises queries, too
                given = (query / where._q_scale).to(torch.float8_e4m3fn)
                query = given.float() * where._q_scale
            passed.attend(impl, where, given, key, value, engine.caches[layer], output)
            for b in range(2):
                for head in range(HEADS):
                    if number == 0:
                        view = store.view(layer, 2)
                        seen[layer, b, head] = seen_tokens(engine, view, b, head)
                for j in range(num_rows):
                    row = b * num_rows + j
                    for head in range(HEADS):
                        tokens = seen[layer, b, head]
                        before = past.get((layer, b), [])
                        own = slice(b * num_rows, row + 1)
                        keys = torch.cat(
                            [
                                engine.keys(layer, b, lens[b])[tokens],
                                *(k[None] for k, _ in before),
                                key[own],
                            ]
                        )
                        values = torch.cat(
                            [
                                engine.values(layer, b, lens[b])[tokens],
                                *(v[None] for _, v in before),
                                value[own],
                            ]
                        )
                        group = slice(head * 2, head * 2 + 2)
                        expected = dense(query[row], keys, values)[group]
                        got = output[row, group].double()
                        assert torch.allclose(got, expected, atol=1e-5)
                for j in range(takes[b]):
                    row = b * num_rows + j
                    past.setdefault((layer, b), []).append((key[row], value[row]))
            assert output[2 * num_rows :].isnan().all()
        kept = [n + take for n, take in zip(kept, takes, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(held, engine.caches, strict=True))


def test_steps_without_a_choice_are_told_less() -> None:
    """The same views, whether the device or the host knows that nobody chooses."""
    engine = PagedRequests(requests=3, tokens=120)
    store = engine.store(max_requests=3)
    rows, lens = ints([store.open() for _ in range(3)]), ints([80, 90, 100])
    store.begin(ViewBatch(engine.table, rows, lens, ints([1, 1, 1])))
    for layer in range(LAYERS):
        store.refresh_layer(layer, torch.randn(3, 2, QUERY_HEADS, DIM))
    store.end(3)
    found = []
    for selects in (True, False):
        store.begin(
            ViewBatch(engine.table, rows, lens + 3, ints([0, 0, 0])),
            ints([1, 0, 1]),
            selects=selects,
        )
        for tensor in (store.num_blocks, store.view_lens):
            tensor.fill_(-7)
        store.build(3)
        built = (store.num_blocks[:3], store.view_lens[:3], store.blocks(3)[:, [0, 2]])
        found.append([tensor.clone() for tensor in built])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].tolist()[1] == -1


def refresh_views(engine: PagedRequests) -> RefreshViews:
    keys = {"specpv_mode": "refresh", "specpv_n_spec_tokens_buf": 8}
    keys |= {"specpv_full_refresh_interval": 2}
    settings = SimpleNamespace(specpv=lambda: config(**keys), specpv_max_requests=2)
    return RefreshViews(
        settings,
        [str(layer) for layer in range(LAYERS)],
        engine.key_caches,
        max_batch=4,
        max_tokens=120,
        max_rows=2,
        num_heads=QUERY_HEADS,
        dtype=torch.float32,
    )


def test_views_of_mode_refresh_come_and_go() -> None:
    """First full, then partial, full again after two; nobody keeps a view of requests before."""
    engine = PagedRequests(requests=3, tokens=120)
    views = refresh_views(engine)
    store, launches = views.store, []
    begin = store.begin
    store.begin = lambda *args, **keys: (launches.append(keys["selects"]), begin(*args, **keys))

    def step(names: list[str], lens: list[int]) -> list[int]:
        count = len(names)
        opened = views.begin(
            names,
            [2] * count,
            [1] * count,
            lens,
            [False] * count,
            ints(lens),
            engine.table[:count].contiguous(),
        )
        for layer in range(LAYERS):
            query = torch.randn(2 * count, QUERY_HEADS, DIM)
            if opened.selects:
                views.queries(layer, query).copy_(query)
        views.finish()
        return store.num_blocks[:count].tolist()

    assert step(["short"], [10]) == [-1]
    assert launches == [], "where nobody has a view, there is nothing to tell"
    whole, seen = [-1, -1, -1], SINK + CHOSEN + WINDOW
    assert step(["short", "a", "b"], [12, 80, 90]) == whole
    for lens in ([12, 81, 91], [12, 82, 92]):
        short, first, second = step(["short", "a", "b"], lens)
        assert short == -1
        assert min(first, second) >= seen
    assert step(["short", "a", "b"], [12, 83, 93]) == whole
    assert step(["short", "a", "b"], [12, 84, 94])[1] >= seen
    assert launches == [True, False, False, True, False]
    # Others at the same places see everything, and the device is told so once.
    assert step(["short", "third", "fourth"], [12, 20, 20]) == whole
    assert store.num_blocks.tolist() == [-1] * 4
    store.num_blocks.fill_(5)
    step(["short"], [12])
    assert store.num_blocks.tolist() == [5] * 4
    assert len(launches) == 5


def test_prompts_in_pieces_of_one_row_are_full_and_choose_nothing() -> None:
    """Such a piece looks like a step without drafts. A request that is computed again, too, loses
    the view it had."""
    views = refresh_views(PagedRequests(requests=1, tokens=120))

    def decide(context: int, *, prefilling: bool) -> tuple[bool, bool, str]:
        (made,) = views.requests.decide(["a"], [context], [1], [0], [prefilling])
        return made.partial, made.select, made.trigger

    prompt = (False, False, "short_context")
    assert [decide(c, prefilling=True) for c in (100, 101, 102)] == [prompt] * 3
    assert len(views.store._free) == 2, "no row is taken for it"
    assert decide(103, prefilling=False) == (False, True, "first")
    assert decide(104, prefilling=False) == (True, False, "none")
    assert decide(90, prefilling=True) == prompt
    assert decide(105, prefilling=False) == (False, True, "first")


def test_requests_behind_see_everything_and_keep_their_views() -> None:
    engine = PagedRequests(requests=2, tokens=120)
    views = refresh_views(engine)

    def step(contexts: list[int], front: int) -> list[str]:
        """Triggers of "a", which verifies a draft, and "b", which has none."""
        before = Metrics().snapshot()["specpv_full_steps_total"]
        opened = views.begin(
            ["a", "b"], [2, 1], [1, 0], contexts, [False, False],
            ints(contexts[:front]), engine.table[:front].contiguous(),
        )  # fmt: skip
        assert (opened.count if opened is not None else 0) == front
        views.finish()
        now = Metrics().snapshot()["specpv_full_steps_total"]
        return sorted(t for t in now for _ in range(now[t] - before.get(t, 0)))

    assert step([80, 90], 2) == ["first", "first"]
    assert step([82, 91], 1) == ["policy"]
    assert step([83, 92], 0) == ["policy", "policy"]
    assert step([84, 93], 2) == []
    assert step([10, 20], 0) == ["short_context", "short_context"]
    assert len(views.store._free) == 0
    assert views.begin([], [], [], [], [], ints([]), engine.table[:0]) is None
    assert len(views.store._free) == 2


def test_drift_counts_rows_of_the_requests_that_were_asked_for() -> None:
    engine = PagedRequests(requests=3, tokens=120)
    store = engine.store(max_requests=3)
    probe = DriftProbe(store, 8)
    rows, lens = ints([store.open() for _ in range(3)]), ints([80, 90, 100])
    store.begin(ViewBatch(engine.table, rows, lens, ints([1, 1, 1])))
    for layer in range(LAYERS):
        store.refresh_layer(layer, torch.randn(3, 2, QUERY_HEADS, DIM))
    store.end(3)
    store.begin(ViewBatch(engine.table, rows, lens, ints([1, 0, 1])), ints([0, 1, 0]))
    probe.build(engine.table, ints([1, 0, 1]))
    output = torch.randn(6, QUERY_HEADS, DIM)
    change = torch.tensor([1.0, 1.05, 3.0, 3.0, 1.2, 1.0])  # of rows; the request between: unasked
    before = Metrics().snapshot()
    for row_requests in (None, torch.tensor([0, 0, 1, 1, 2, 2])):
        views = []

        def attend(view: PartialView, views: list = views) -> torch.Tensor:
            views.append(view)
            return output * change[:, None, None]

        probe.look(LAYERS - 1, 3, row_requests, attend, output)
        (view,) = views
        assert view.num_blocks.tolist()[1] == 0
        assert view.view_lens.tolist()[1] == 0
        assert view.view_lens.tolist()[0] == (SINK + CHOSEN + WINDOW) * BLOCK
    probe.rest()
    views.clear()
    probe.look(LAYERS - 1, 3, None, attend, output)  # as a graph does: it counts nobody
    assert views[0].view_lens.tolist() == views[0].num_blocks.tolist() == [0, 0, 0]
    probe.read()
    now = Metrics().snapshot()
    assert now["specpv_probed_rows_total"] - before["specpv_probed_rows_total"] == 8
    assert now["specpv_deviating_rows_total"] - before["specpv_deviating_rows_total"] == 2
