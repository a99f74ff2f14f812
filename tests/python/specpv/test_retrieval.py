"""select_blocks against a float64 reference: exact on integers, ties included."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from nwor_specpv import NworError, select_blocks
from tests.python.specpv.contexts import DEVICES, best, scores_of, seeded

REDUCTIONS = list(
    itertools.product(
        ["specpv", "quest"], ["mean", "max", "last"], ["mean", "max"], ["per_head", "shared"]
    )
)


def whole(*shape: int) -> torch.Tensor:
    """Small integers: every product and sum is exact in every dtype used."""
    return torch.randint(-2, 3, shape).float()


def expected_ids(
    query: torch.Tensor,
    kmax: torch.Tensor,
    kmin: torch.Tensor,
    candidates: list[int],
    k: int,
    score: str,
    query_reduce: str,
    group_reduce: str,
    selection: str,
    rows: list[tuple[int, int]] | None = None,
) -> torch.Tensor:
    lists = []
    for b, count in enumerate(candidates):
        begin, end = rows[b] if rows else (0, query.shape[1])
        scores = scores_of(
            query[b, begin:end].double().cpu().numpy(),
            kmax[b, :count].double().cpu().numpy(),
            kmin[b, :count].double().cpu().numpy(),
            score,
            query_reduce,
            group_reduce,
        )
        # Means of integers divide by equal numbers: compare sums, which are exact.
        factor = (end - begin if query_reduce == "mean" else 1) * (
            query.shape[2] // kmax.shape[2] if group_reduce == "mean" else 1
        )
        scores = np.rint(scores * factor)
        if selection == "shared":
            scores = np.repeat(scores.sum(axis=0, keepdims=True), len(scores), axis=0)
        lists.append([best(row, k) for row in scores])
    return torch.tensor(lists, dtype=torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("score", "query_reduce", "group_reduce", "selection"), REDUCTIONS)
def test_exact_on_integers(
    device: str, score: str, query_reduce: str, group_reduce: str, selection: str
) -> None:
    rng = seeded()
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    summary = rng.choice([dtype, torch.float32])
    kv_heads, group = rng.choice([(1, 1), (2, 3), (3, 4), (2, 1)])
    dim = rng.choice([3, 16, 64, 80, 128])
    queries, blocks, batch = rng.randrange(1, 12), rng.randrange(1, 60), rng.randrange(1, 4)
    k = rng.randrange(1, blocks + 4)
    candidates = [rng.randrange(0, blocks + 1) for _ in range(batch)]
    query = whole(batch, queries, kv_heads * group, dim)
    kmin = whole(batch, blocks, kv_heads, dim)
    kmax = kmin + torch.randint(0, 3, kmin.shape)
    rows = None
    if rng.random() < 0.5:
        bounds = [sorted(rng.sample(range(queries + 1), 2)) for _ in range(batch)]
        rows = [(begin, end) for begin, end in bounds]
    wanted = expected_ids(
        query, kmax, kmin, candidates, k, score, query_reduce, group_reduce, selection, rows
    )
    for b, count in enumerate(candidates):  # beyond the candidates nothing may be read
        kmax[b, count:], kmin[b, count:] = float("nan"), float("nan")
        if rows:
            query[b, : rows[b][0]] = query[b, rows[b][1] :] = float("nan")
    got = select_blocks(
        query.to(device, dtype),
        kmax.to(device, summary),
        kmin.to(device, summary),
        torch.tensor(candidates, dtype=torch.int32, device=device),
        k,
        score,
        query_reduce,
        group_reduce,
        selection,
        query_rows=None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device),
    )
    assert got.dtype == torch.int32
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["specpv", "quest"])
def test_chosen_blocks_score_highest(device: str, score: str) -> None:
    """Real numbers: no block left out scores more than one taken, beyond rounding."""
    rng = seeded()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    blocks, k = rng.randrange(200, 700), 37
    query = torch.randn(2, 5, 8, 64).to(dtype)
    kmin = torch.randn(2, blocks, 2, 64).to(dtype)
    kmax = (kmin.float() + torch.rand(2, blocks, 2, 64)).to(dtype)
    candidates = [blocks, blocks - 3]
    ids = select_blocks(
        query.to(device),
        kmax.to(device),
        kmin.to(device),
        torch.tensor(candidates, dtype=torch.int32, device=device),
        k,
        score,
    ).cpu()
    for b, count in enumerate(candidates):
        scores = scores_of(
            query[b].double().numpy(),
            kmax[b, :count].double().numpy(),
            kmin[b, :count].double().numpy(),
            score,
            "mean",
            "mean",
        )
        for head, row in enumerate(ids[b].tolist()):
            assert row == sorted(set(row))
            assert row[-1] < count
            left_out = np.delete(scores[head], row)
            assert scores[head][row].min() >= left_out.max() - 1e-4


# Scores of a list, by what they are like: spread over many magnitudes or over a few neighbouring
# floats, few or many equal ones.
LISTS = {
    "wide": lambda n: torch.randn(n) * 10 ** torch.empty(n).uniform_(-20, 20),
    "near": lambda n: 300 + torch.randn(n),
    "narrow": lambda n: torch.tensor(300.0).view(torch.int32) + torch.randint(4000, (n,)).int(),
    "few": lambda n: torch.tensor(300.0).view(torch.int32) + torch.randint(3, (n,)).int(),
    "two clusters": lambda n: torch.where(torch.rand(n) < 0.01, 1e9, 1.0) + torch.randn(n) / 2**18,
    "signs": lambda n: torch.randn(n).round(decimals=2),
    "missing": lambda n: torch.randn(n).masked_fill(torch.rand(n) < 0.9, float("nan")),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("like", LISTS)
def test_long_lists_of_any_scores(device: str, like: str) -> None:
    """One channel and one query of 1: a block's score is its summary, bit for bit."""
    rng = seeded()
    for blocks in (rng.randrange(1500, 2049), 8182, rng.randrange(8193, 40000)):
        lists = [LISTS[like](blocks) for _ in range(2)]
        values = torch.stack([v.view(torch.float32) for v in lists]).reshape(2, blocks, 1, 1)
        k = rng.randrange(1, 600)
        count = [blocks, rng.randrange(blocks)]
        ids = select_blocks(
            torch.ones(2, 1, 1, 1, device=device),
            values.to(device),
            values.to(device),
            torch.tensor(count, dtype=torch.int32, device=device),
            k,
            out=torch.full((2, 1, k), -7, dtype=torch.int32, device=device),
        ).cpu()
        for b in range(2):
            row = values[b, : count[b], 0, 0].double().nan_to_num(nan=-float("inf"))
            order = torch.sort(row, descending=True, stable=True).indices[:k]
            wanted = order.sort().values.tolist()
            assert ids[b, 0].tolist() == wanted + [-1] * (k - len(wanted)), (blocks, k)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores_go_to_the_lower_id(device: str) -> None:
    ones = torch.ones(1, 1, 1, 64, device=device)
    for blocks in (5, 64, 3000):
        summary = torch.ones(1, blocks, 1, 64, device=device)
        count = torch.tensor([blocks], dtype=torch.int32, device=device)
        ids = select_blocks(ones, summary, summary, count, 4)
        assert ids.tolist() == [[[0, 1, 2, 3]]]
        summary[0, blocks - 1] = 2.0
        ids = select_blocks(ones, summary, summary, count, 4)
        assert ids.tolist() == [[[0, 1, 2, blocks - 1]]]
        zero = torch.zeros_like(summary)
        zero[0, ::2] = -0.0
        assert select_blocks(ones, zero, zero, count, 2).tolist() == [[[0, 1]]]


@pytest.mark.parametrize("device", DEVICES)
def test_nan_is_below_everything_and_infinities_are_in_order(device: str) -> None:
    query = torch.ones(1, 1, 1, 1, device=device)
    values = [float("nan"), -float("inf"), 3.0, float("inf"), -5.0, float("nan"), 0.0]
    summary = torch.tensor(values, device=device).reshape(1, -1, 1, 1)
    count = torch.tensor([len(values)], dtype=torch.int32, device=device)
    taken = [select_blocks(query, summary, summary, count, k).flatten().tolist() for k in (1, 3, 5)]
    assert taken == [[3], [2, 3, 6], [1, 2, 3, 4, 6]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 64])
@pytest.mark.parametrize("score", ["specpv", "quest"])
def test_a_maximum_goes_by_the_rows_that_are_numbers(device: str, dim: int, score: str) -> None:
    """Wherever they stand, among the queries of a head as among heads."""
    summary = torch.arange(4.0, device=device).reshape(1, 4, 1, 1).expand(1, 4, 1, dim)
    summary = summary.contiguous()
    count = torch.tensor([4], dtype=torch.int32, device=device)
    for rows in ([math.nan, 1.0], [1.0, math.nan], [math.nan, 1.0, math.nan, 2.0]):
        query = torch.tensor(rows, device=device).reshape(1, -1, 1, 1).expand(1, len(rows), 1, dim)
        for given in (query, query.transpose(1, 2)):
            ids = select_blocks(given, summary, summary, count, 1, score, "max", "max")
            assert ids.tolist() == [[[3]]], (rows, given.shape)


@pytest.mark.parametrize("device", DEVICES)
def test_the_greater_product_is_the_one_that_is_a_number(device: str) -> None:
    query = torch.tensor([1.0, -1.0], device=device).reshape(1, 1, 1, 2)
    kmax = torch.tensor([[math.inf, math.inf], [1.0, 2.0]], device=device).reshape(1, 2, 1, 2)
    kmin = torch.tensor([[5.0, 0.0], [0.0, 0.0]], device=device).reshape(1, 2, 1, 2)
    count = torch.tensor([2], dtype=torch.int32, device=device)
    for reduce in ("mean", "max"):
        for given in ((kmax, kmin), (kmin, kmax)):
            assert select_blocks(query, *given, count, 1, "specpv", reduce).tolist() == [[[0]]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_reduce", ["mean", "max", "last"])
def test_quest_leaves_out_channels_that_are_no_numbers(device: str, query_reduce: str) -> None:
    query = torch.tensor([[1.0, math.nan], [1.0, 0.0]], device=device).reshape(1, 2, 1, 2)
    query = query.flip(1) if query_reduce == "last" else query
    summary = torch.arange(6.0, device=device).reshape(1, 3, 1, 2)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    for group_reduce in ("mean", "max"):
        ids = select_blocks(query, summary, summary, count, 1, "quest", query_reduce, group_reduce)
        assert ids.tolist() == [[[2]]]


@pytest.mark.parametrize("query_reduce", ["mean", "max", "last"])
@pytest.mark.parametrize("group_reduce", ["mean", "max"])
def test_quest_with_infinite_bounds_is_its_sum_of_maxima(
    query_reduce: str, group_reduce: str
) -> None:
    """On the CPU; a bound that no query of its sign meets is nothing, however large."""
    kmax = torch.tensor([[1.0, 1.0], [5.0, 5.0], [2.0, math.inf], [math.nan, 9.0]])
    kmin = torch.tensor([[0.0, 0.0], [-math.inf, 0.0], [1.0, -math.inf], [math.nan, 0.0]])
    count = torch.tensor([4], dtype=torch.int32)
    for channels, best_block in (([1.0, 1.0], 2), ([1.0, 0.0], 1), ([0.0, -1.0], 2)):
        query = torch.tensor(channels).reshape(1, 1, 1, 2).expand(1, 3, 2, 2)
        ids = select_blocks(
            query,
            kmax.reshape(1, 4, 1, 2),
            kmin.reshape(1, 4, 1, 2),
            count,
            1,
            "quest",
            query_reduce,
            group_reduce,
        )
        assert ids.tolist() == [[[best_block]]], channels


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_beyond_int32_do_not_wrap(device: str) -> None:
    arguments = {name: getattr(v, "to", lambda _, v=v: v)(device) for name, v in good().items()}
    for number in (2**32 + 2, 2**31, -(2**31) - 1):
        given = arguments | {"num_candidates": torch.tensor([9, number], device=device)}
        if device == "cpu":
            with pytest.raises(NworError, match=rf"num_candidates\[1\]: got {number}, expected"):
                select_blocks(**given)
            continue
        nearest = max(-(2**31), min(number, 2**31 - 1))
        saturated = torch.tensor([9, nearest], dtype=torch.int32, device=device)
        wanted = select_blocks(**(given | {"num_candidates": saturated}))
        assert torch.equal(select_blocks(**given), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_requests_without_a_number_keep_their_ids(device: str) -> None:
    query = torch.ones(3, 1, 1, 64, device=device)
    summary = torch.randn(3, 9, 1, 64, device=device)
    ids = torch.full((3, 1, 4), 55, dtype=torch.int32, device=device)
    candidates = torch.tensor([-1, 2, -1], dtype=torch.int32, device=device)
    scores = torch.full((27,), float("nan"), device=device)
    out = select_blocks(query, summary, summary, candidates, 4, out=ids, scores=scores)
    assert out is ids
    assert ids.tolist() == [[[55] * 4], [[0, 1, -1, -1]], [[55] * 4]]
    assert (select_blocks(query, summary, summary, candidates, 4)[0] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides(device: str) -> None:
    rng = seeded()
    query = whole(2, 4, 4, 64).to(device)
    kmin = whole(2, 20, 2, 64).to(device)
    kmax = kmin + 1
    count = torch.tensor([20, 17], dtype=torch.int32, device=device)
    wanted = select_blocks(query, kmax, kmin, count, 6)
    heads_first = query.transpose(1, 2).contiguous().transpose(1, 2)
    channels_last = kmax.transpose(2, 3).contiguous().transpose(2, 3)
    both = torch.stack([kmin, kmin], dim=2)[:, :, rng.randrange(2)]
    assert torch.equal(select_blocks(heads_first, channels_last, both, count, 6), wanted)
    packed = query.flatten(0, 1)[None].expand(2, -1, -1, -1)  # rows of all requests together
    rows = torch.tensor([[0, 4], [4, 8]], dtype=torch.int32, device=device)
    assert torch.equal(select_blocks(packed, kmax, kmin, count, 6, query_rows=rows), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_reduce", ["mean", "max", "last"])
def test_rows_of_many_requests_in_one_tensor(device: str, query_reduce: str) -> None:
    """As many as no kernel has room for: it goes by the most that one request has."""
    rng = seeded()
    requests, rows, most = 9, 40, 8
    query = whole(1, requests * rows, 8, 64).expand(requests, -1, -1, -1)
    kmin = whole(requests, 70, 2, 64)
    kmax = kmin + 1
    candidates = [rng.randrange(1, 71) for _ in range(requests)]
    spans = []
    for b in range(requests):
        begin = b * rows + rng.randrange(rows - most)
        spans.append((begin, begin + rng.randrange(1, most + 1)))
    wanted = expected_ids(
        query, kmax, kmin, candidates, 6, "specpv", query_reduce, "mean", "per_head", spans
    )
    given = {
        "query": query[:1].to(device, torch.bfloat16).expand(requests, -1, -1, -1),
        "kmax": kmax.to(device, torch.bfloat16),
        "kmin": kmin.to(device, torch.bfloat16),
        "num_candidates": torch.tensor(candidates, dtype=torch.int32, device=device),
        "k": 6,
        "query_reduce": query_reduce,
    }

    def choose(spans: list[tuple[int, int]], max_rows: int) -> torch.Tensor:
        ranges = torch.tensor(spans, dtype=torch.int32, device=device)
        return select_blocks(**given, query_rows=ranges, max_rows=max_rows).cpu()

    for max_rows in (most, 0, 3):  # what is said of the rows must not change what is chosen
        assert torch.equal(choose(spans, max_rows), wanted)


@pytest.mark.parametrize(("score", "query_reduce", "group_reduce", "selection"), REDUCTIONS)
def test_as_many_rows_as_there_may_be(
    score: str, query_reduce: str, group_reduce: str, selection: str
) -> None:
    """Maxima look at 4096 rows of heads at most, sums and last rows at any number."""
    seeded()
    kept = "max" in (query_reduce, group_reduce) and query_reduce != "last"
    rows = 2048 if kept and (score, query_reduce) != ("quest", "mean") else 5000
    query, kmax = whole(1, rows, 4, 8), whole(1, 6, 2, 8)
    kmin = kmax - whole(1, 6, 2, 8).abs()
    reductions = (score, query_reduce, group_reduce, selection)
    ids = select_blocks(
        query,
        kmax,
        kmin,
        torch.tensor([6], dtype=torch.int32),
        3,
        *reductions,
        query_rows=torch.tensor([[0, rows]], dtype=torch.int32),
    )
    assert torch.equal(ids, expected_ids(query, kmax, kmin, [6], 3, *reductions))


def good() -> dict:
    return {
        "query": torch.randn(2, 3, 4, 16),
        "kmax": torch.randn(2, 9, 2, 16),
        "kmin": torch.randn(2, 9, 2, 16),
        "num_candidates": torch.tensor([9, 4], dtype=torch.int32),
        "k": 3,
    }


WRONG = {
    "rank": ({"query": torch.zeros(2, 3, 16)}, "query"),
    "heads": ({"query": torch.zeros(2, 3, 3, 16)}, "query: got 3 heads, expected a multiple"),
    "channels": ({"query": torch.zeros(2, 3, 4, 8)}, "kmax: got sizes"),
    "batch": ({"query": torch.zeros(1, 3, 4, 16)}, "kmax: got sizes"),
    "kmin": ({"kmin": torch.zeros(2, 8, 2, 16)}, "kmin: got"),
    "no rows": ({"query": torch.zeros(2, 0, 4, 16)}, "query: got no rows"),
    "too many": (
        {"num_candidates": torch.tensor([9, 10], dtype=torch.int32)},
        r"num_candidates\[1\]: got 10",
    ),
    "k": ({"k": -1}, "k: got -1"),
    "score": ({"score": "best"}, "score: got 'best', expected one of"),
    "auto": ({"score": "auto"}, "score: got 'auto'"),
    "query_reduce": ({"query_reduce": "min"}, "query_reduce: got 'min'"),
    "group_reduce": ({"group_reduce": "last"}, "group_reduce: got 'last'"),
    "selection": ({"selection": "each"}, "selection: got 'each'"),
    "rows": (
        {"query_rows": torch.tensor([[0, 3], [1, 4]], dtype=torch.int32)},
        r"query_rows\[1\]: got 1 to 4",
    ),
    "many rows": (
        {
            "query": torch.zeros(2, 4096, 4, 16),
            "query_rows": torch.tensor([[0, 2048], [0, 2049]], dtype=torch.int32),
            "query_reduce": "max",
        },
        r"query_rows\[1\]: got 2049 rows of 2 heads each, expected at most 4096",
    ),
    "dtype": ({"query": torch.zeros(2, 3, 4, 16, dtype=torch.float64)}, "query: got dtype"),
    "max_rows": ({"max_rows": -1}, "max_rows: got -1"),
    "out": ({"out": torch.zeros(2, 2, 4, dtype=torch.int32)}, "out: got sizes"),
    "scores": (
        {"out": torch.zeros(2, 2, 3, dtype=torch.int32), "scores": torch.zeros(35)},
        "scores: got",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(NworError, match=message):
        select_blocks(**(good() | changes))


def test_nothing_to_select_is_legal() -> None:
    assert select_blocks(**(good() | {"k": 0})).shape == (2, 2, 0)
    arguments = good() | {"num_candidates": torch.zeros(2, dtype=torch.int32)}
    assert (select_blocks(**arguments) == -1).all()


def test_fakes_and_schemas() -> None:
    ops = torch.ops.nwor_specpv
    arguments = tuple(good().values())
    torch.library.opcheck(ops.select_blocks.default, arguments)
    ids, scores = torch.zeros(2, 2, 3, dtype=torch.int32), torch.zeros(36)
    # Scratch holds what it likes afterwards, so outputs are compared without it.
    torch.library.opcheck(ops.select_blocks_out.default, arguments[:4], {"ids": ids})
    torch.library.opcheck(
        ops.select_blocks_out.default,
        arguments[:4],
        {"ids": ids, "scores": scores},
        test_utils=("test_faketensor",),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    arguments = good()
    ids = torch.zeros(2, 2, 3, dtype=torch.int32)

    def refresh(query: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        given = arguments | {"query": query * 2}
        select_blocks(**given, out=ids)
        return select_blocks(**given) + ids

    expected = refresh(arguments["query"], ids)
    compiled = torch.compile(refresh, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(compiled(arguments["query"], torch.zeros_like(ids)), expected)
