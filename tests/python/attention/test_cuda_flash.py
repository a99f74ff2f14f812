"""FlashAttention's routes on CUDA: what they give, and what they make of lengths that are wrong.

`torch_flash` is in every torch with CUDA. `flash_attn_2` and `flash_attn_3` come from packages of
their own, or from vLLM where that can be imported; elsewhere their tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nwor_specpv import CompactView, NworError, verify_plan
from nwor_specpv.bench.timing import capture
from nwor_specpv.ops.attention import last_route, route_report
from tests.python.attention.steps import FP8, Shape, Step, assert_close, make_step, moved

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

INT_MAX = 2**31 - 1


def require(route: str) -> None:
    """Skips where the route cannot be had; the report imports the package that brings it."""
    found = route_report()[route]
    if not found.startswith("present") or "flash_attn::" in found:  # which has pages of 256 only
        pytest.skip(f"{route}: {found}")


@pytest.fixture(params=["torch_flash", "flash_attn_2", "flash_attn_3"])
def route(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return request.param


def new_status() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.int64, device="cuda")


# rows, prefix, whether the host tells how many rows the longest request has
BATCHES = [
    ([5, 5], [300, 40], True),
    ([1, 1, 1], [1100, 0, 64], True),
    ([1, 0, 1], [90, 17, 33], True),
    ([0, 1], [90, 17], False),
    ([1, 8, 0, 33], [300, 40, 9, 0], True),
    ([70, 3, 1], [513, 16, 0], False),
    ([2, 6], [0, 0], True),
]


@pytest.mark.parametrize("mask", ["causal", "chain", "tree"])
@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_equals_the_reference(route: str, batch: int, mask: str) -> None:
    rows, prefix, told = BATCHES[batch]
    shape = Shape(
        rows=rows,
        prefix=prefix,
        heads=8,
        kv_heads=2,
        head_dim=128 if batch % 2 else 64,
        page_size=32 if batch % 3 == 1 else 16,
        dtype=torch.bfloat16 if batch % 2 else torch.float16,
        layout="packed" if batch % 3 == 2 else "kv_first",
        mask=mask,
    )
    step = make_step(shape, 40 + batch, "cuda")
    status = new_status()
    out, lse = step.run(route=route, max_rows=max(rows) if told else 0, status=status)
    assert status.tolist() == [0] * 8
    assert_close(step, out, lse)
    assert last_route() == f"{route} (requested by name)"


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(96, 3, 1), (128, 7, 7), (256, 4, 2)])
def test_other_heads(route: str, head_dim: int, heads: int, kv_heads: int) -> None:
    shape = Shape([4, 9], [200, 31], heads, kv_heads, head_dim, dtype=torch.bfloat16, mask="tree")
    step = make_step(shape, head_dim, "cuda")
    assert_close(step, *step.run(route=route, max_rows=9))


@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_softcap_is_computed_or_refused(route: str, mask: str) -> None:
    shape = Shape([4, 9], [200, 31], 4, 2, 128, dtype=torch.bfloat16, mask=mask, softcap=5.0)
    step = make_step(shape, 51, "cuda")
    if route != "torch_flash":
        assert_close(step, *step.run(route=route, max_rows=9))
    else:
        with pytest.raises(NworError, match=rf"^route: got '{route}'.*\n(.*\n)*.*missing softcap"):
            step.run(route=route, max_rows=9)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"window": 30}, "window"),
        ({"view": "partial"}, "partial view"),
        ({"cache_dtype": FP8}, "float8 cache"),
    ],
)
def test_what_the_route_lacks_is_refused_by_name(route: str, change: dict, missing: str) -> None:
    step = make_step(replace(Shape([4], [200], dtype=torch.bfloat16), **change), 52, "cuda")
    out = torch.full_like(step.arguments["query"], 7.0)
    with pytest.raises(NworError) as refusal:
        step.run(route=route, out=out)
    lines = str(refusal.value).splitlines()
    assert lines[0].startswith(f"route: got '{route}'")
    told = next(line for line in lines if line.startswith(f"{route}: "))
    assert missing in told.split("missing ")[1]
    assert (out == 7.0).all()


def test_heads_that_do_not_divide_are_refused(route: str) -> None:
    step = make_step(Shape([4], [40], heads=4, kv_heads=2, dtype=torch.bfloat16), 53, "cuda")
    step.arguments["query"] = step.arguments["query"][:, :3]
    for name in (route, "cuda", "auto"):
        with pytest.raises(NworError, match=r"^query: got 3 heads, expected a multiple of the 2 "):
            step.run(route=name)
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    with pytest.raises(NworError, match=r"^query: got 3 heads"):
        verify_plan(*(step.arguments[name] for name in names))


def prefill(dtype: torch.dtype = torch.bfloat16) -> Step:
    """More than 256 rows in a request, garbage in what no length reaches."""
    shape = Shape([300, 5, 2], [70, 40, 90], heads=4, kv_heads=2, dtype=dtype)
    return make_step(shape, 60, "cuda")


def room_of(step: Step) -> int:
    return step.arguments["block_table"].shape[1] * step.shape.page_size


def set_length(step: Step, value: Callable[[Step], int]) -> tuple[int, int, int]:
    step.arguments["prefix_lens"][1] = value(step)
    return 1, 1, value(step)


def set_page(step: Step, value: Callable[[Step], int]) -> tuple[int, int, int]:
    step.arguments["block_table"][1, 2] = value(step)  # the last of 40 tokens' pages
    return 4, 1, value(step)


def set_start(step: Step, at: int, value: int) -> tuple[int, int, int]:
    step.arguments["query_start"][at] = value
    return 2, at - 1, value


# name -> (what makes the fault and says which status it gives, requests that are still right)
FAULTS: dict[str, tuple[Callable[[Step], tuple[int, int, int]], list[int]]] = {
    "a length beyond the table": (lambda s: set_length(s, lambda s: room_of(s) + 1), [0, 2]),
    "a length beyond everything": (lambda s: set_length(s, lambda _: INT_MAX), [0, 2]),
    "a negative length": (lambda s: set_length(s, lambda _: -3), [0, 2]),
    "a page beyond the cache": (
        lambda s: set_page(s, lambda s: s.arguments["key_cache"].shape[0]),
        [0, 2],
    ),
    "a page far beyond": (lambda s: set_page(s, lambda _: INT_MAX), [0, 2]),
    "a negative page": (lambda s: set_page(s, lambda _: -1), [0, 2]),
    "rows beyond the last": (lambda s: set_start(s, 3, 400), [0, 1]),
    "rows that go back": (lambda s: set_start(s, 2, 290), [0]),
    "rows below the first": (lambda s: set_start(s, 2, -INT_MAX), [0]),
}


def expect_right(step: Step, out: torch.Tensor, lse: torch.Tensor, alone: dict[int, Step]) -> None:
    starts = [sum(step.shape.rows[:b]) for b in range(len(step.shape.rows))]
    for b, one in alone.items():
        rows = slice(starts[b], starts[b] + step.shape.rows[b])
        assert_close(one, out[rows], lse[rows])


@pytest.mark.parametrize("fault", FAULTS)
def test_prefill_tells_of_the_fault_and_computes_the_others(route: str, fault: str) -> None:
    step = prefill()
    alone = {b: step.only(b) for b in FAULTS[fault][1]}
    expected = FAULTS[fault][0](step)
    status = new_status()
    out, lse = step.run(route=route, max_rows=300, status=status)
    assert tuple(status[:3].tolist()) == expected
    assert status[3:].tolist() == [0] * 5
    expect_right(step, out, lse, alone)
    # Without a status word nothing is told, and nothing else changes.
    out, lse = step.run(route=route, max_rows=300)
    expect_right(step, out, lse, alone)


def test_prefill_by_itself_takes_a_flash_route_and_keeps_the_first_error(route: str) -> None:
    step = prefill(torch.float16)
    status = new_status()
    out, lse = step.run(max_rows=300, status=status)
    assert "flash" in last_route()
    assert "prefill" in last_route()
    assert status.tolist() == [0] * 8  # the unused entries of the table hold anything
    assert_close(step, out, lse)
    alone = {1: step.only(1)}
    step.arguments["prefix_lens"][2] = room_of(step) + 7
    step.arguments["block_table"][0, 0] = -9
    step.run(route=route, max_rows=300, status=status)
    assert status[:3].tolist() == [1, 2, room_of(step) + 7]
    step.arguments["prefix_lens"][2] = 90
    out, lse = step.run(route=route, max_rows=300, status=status)
    assert status[:3].tolist() == [1, 2, room_of(step) + 7]
    expect_right(step, out, lse, alone)
    status.zero_()
    step.run(route=route, max_rows=300, status=status)
    assert status[:3].tolist() == [4, 0, -9]


# FlashAttention-3 goes before FlashAttention-2, but does not take pages of 80 tokens and more.
@pytest.mark.parametrize(
    ("package", "page_size"), [(None, 16), ("flash_attn_3", 16), ("flash_attn_2", 128)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_changes_no_bit_of_requests_beside_it_nor_they_of_it(
    package: str | None, page_size: int, head_dim: int
) -> None:
    """Nor does what is not finite in one request reach another."""
    if package is not None:
        require(package)
    rows, prefix = [3, 300, 256, 260, 1, 0], [700, 70, 40, 130, 1100, 9]
    shape = Shape(rows, prefix, 8, 2, head_dim, page_size, dtype=torch.bfloat16)
    step = make_step(shape, 62, "cuda")
    status = new_status()
    out, lse = step.run(max_rows=300, status=status)
    assert last_route().startswith(package or "")
    assert "prefill" in last_route()
    assert "requests of fewer take cuda" in last_route()
    assert status.tolist() == [0] * 8
    assert_close(step, out, lse)
    starts = step.arguments["query_start"].tolist()
    own = [slice(starts[b], starts[b + 1]) for b in range(len(rows))]
    for b in range(5):
        alone, alone_lse = step.only(b).run(max_rows=rows[b])
        assert ("flash" in last_route()) is (rows[b] > 256)
        assert torch.equal(alone, out[own[b]]), b
        assert torch.equal(alone_lse, lse[own[b]]), b
    for b in range(5):
        for wrong in (float("nan"), float("inf")):
            values = step.arguments["value"][own[b]]
            before = values.clone()
            values.fill_(wrong)
            again, again_lse = step.run(max_rows=300)
            values.copy_(before)
            assert torch.equal(again_lse, lse)
            assert not again[own[b]].isfinite().any()
            for other in set(range(5)) - {b}:
                assert torch.equal(again[own[other]], out[own[other]]), (b, other)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("package", "page_size"),
    [("flash_attn_3", size) for size in (16, 64, 80, 128, 144, 176, 256)]
    + [("flash_attn_2", size) for size in (80, 128, 256)],
)
def test_prefill_does_not_read_behind_the_last_token(
    package: str, page_size: int, head_dim: int
) -> None:
    """NaN and infinities are there, in pages of a size that may be one of a kernel's tiles, too."""
    require(package)
    prefix = [page_size + 5, 2 * page_size, page_size - 1]
    shape = Shape([300, 4, 270], prefix, 4, 2, head_dim, page_size, dtype=torch.bfloat16)
    step = make_step(shape, page_size, "cuda")
    assert_close(step, *step.run(max_rows=300))
    taken = package == "flash_attn_2" or page_size < 80
    assert last_route().startswith(package) is taken


def test_only_prefills_and_rows_of_nobody() -> None:
    """The launch for the others finds none; a request of few rows is ours even alone."""
    step = make_step(Shape([300, 280], [70, 33], 8, 2, 128, dtype=torch.bfloat16), 64, "cuda")
    assert_close(step, *step.run(max_rows=300))
    few = make_step(Shape([8], [70], 8, 2, 128, dtype=torch.bfloat16), 65, "cuda")
    out, lse = few.run()
    for name in ("query", "key", "value"):
        given = few.arguments[name]
        filler = torch.full((292, *given.shape[1:]), torch.nan, dtype=given.dtype, device="cuda")
        few.arguments[name] = torch.cat((given, filler))
    again, again_lse = few.run(max_rows=300)
    assert "prefill" in last_route()
    assert torch.equal(again[:8], out)
    assert torch.equal(again_lse[:8], lse)


def test_a_plan_made_for_all_requests_does_no_harm_to_prefill() -> None:
    step = make_step(Shape([300, 5], [70, 400], 4, 2, dtype=torch.bfloat16), 63, "cuda")
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    plan = verify_plan(*(step.arguments[name] for name in names), max_rows=300)
    assert_close(step, *step.run(max_rows=300, plan=plan))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_graph_replays_with_other_lengths_and_tells_of_bad_ones(
    route: str, by_name: bool
) -> None:
    by = route if by_name else "auto"
    shape = Shape([300, 5], [70, 400], heads=4, kv_heads=2, dtype=torch.bfloat16, poison=False)
    step = make_step(shape, 61, "cuda")
    status, out = new_status(), torch.zeros_like(step.arguments["query"])

    def run() -> None:
        step.run(route=by, max_rows=300, status=status, out=out, return_lse=False)

    graph = capture(run)
    for lengths in ([70, 400], [0, 1], [64, 0], [17, 399]):
        short = step.with_lengths(lengths)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(short, out)
        assert status.tolist() == [0] * 8
    step.arguments["prefix_lens"][1] = room_of(step) + 2
    graph.replay()
    assert status[:3].tolist() == [1, 1, room_of(step) + 2]


def test_values_that_are_not_finite_stay_with_their_request(route: str) -> None:
    """Rows of chains lie behind one another; kernels that read them in tiles would read on."""
    shape = Shape([3, 17, 5, 2], [90, 40, 0, 130], 8, 2, 128, dtype=torch.bfloat16, mask="causal")
    for wrong in (float("nan"), float("inf")):
        step = make_step(shape, 75, "cuda")
        alone = {b: step.only(b) for b in (0, 1, 3)}
        step.arguments["value"][20:25] = wrong  # of the third request
        out, lse = step.run(route=route, max_rows=17)
        expect_right(step, out, lse, alone)
        assert not out[20:25].isfinite().any()


# ---- compact views: torch_flash alone reads them ----


@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("rows", [[3, 3, 3], [3, 8, 1], [1, 1, 1]])
@pytest.mark.parametrize("fault", ["none", "unused", "two unused", "long", "longest", "rows"])
def test_a_compact_view_and_its_faults(mask: str, rows: list[int], fault: str) -> None:
    """A request that does not use the view is a fault here: these kernels see views or pages."""
    shape = Shape(rows, [90, 40, 130], 8, 2, 128, dtype=torch.bfloat16, mask=mask, view="compact")
    step = make_step(shape, 70, "cuda")
    view, given = step.options["view"], step.arguments
    alone = {b: step.only(b) for b in range(3)}
    expected, total = [0, 0, 0], sum(rows)
    # Pages and their lengths are not looked at.
    given["prefix_lens"].fill_(INT_MAX)
    given["block_table"].fill_(-7)
    if fault == "unused":
        view.lens[1], expected = -1, [3, 1, -1]
    elif fault == "two unused":
        view.lens[1], view.lens[2], expected = -1, -1, [3, 1, -1]
        alone.pop(2)
    elif fault == "long":
        view.lens[1], view.lens[2], expected = view.keys.shape[2] + 5, -1, [3, 1, 135]
        alone.pop(2)
    elif fault == "longest":
        view.lens[1], expected = INT_MAX, [3, 1, INT_MAX]
    elif fault == "rows":
        given["query_start"][3], expected = total + 4, [2, 2, total + 4]
        alone.pop(2)
    if fault not in ("none", "rows"):
        alone.pop(1)
    status = new_status()
    out, lse = step.run(route="torch_flash", max_rows=max(rows), status=status)
    assert status.tolist() == [*expected, 0, 0, 0, 0, 0]
    expect_right(step, out, lse, alone)
    # A host that does not know the rows gets the same.
    out, lse = step.run(route="torch_flash")
    expect_right(step, out, lse, alone)


@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("rows", [[3, 3], [3, 40]])
def test_a_compact_view_without_room_shows_nothing(mask: str, rows: list[int]) -> None:
    step = make_step(Shape(rows, [90, 40], dtype=torch.bfloat16, mask=mask), 76, "cuda")
    tokens = torch.empty(2, 2, 0, 64, dtype=torch.bfloat16, device="cuda")
    lens = torch.zeros(2, dtype=torch.int32, device="cuda")
    step.options["view"] = CompactView(tokens, tokens.clone(), lens)
    step.seen[:] = [[[], []], [[], []]]
    for told in ({"max_rows": max(rows)}, {}):
        assert_close(step, *step.run(route="torch_flash", **told))
    lens[1] = 5
    status = new_status()
    assert_close(step, *step.run(route="torch_flash", status=status))
    assert status[:3].tolist() == [3, 1, 5]


@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("rows", [[4, 3, 4], [1, 4, 2], [0, 4, 4], [2, 0, 1]])
def test_a_batch_of_fewer_rows_is_filled_up(mask: str, rows: list[int]) -> None:
    """As graphs of one size replay it: four rows for each request, some of them nobody's."""
    shape = Shape(rows, [90, 40, 130], 8, 2, 128, dtype=torch.bfloat16, mask=mask, view="compact")
    step = make_step(shape, 74, "cuda")
    alone = {b: step.only(b) for b in range(3) if rows[b]}
    spare = 12 - sum(rows)
    for name in ("query", "key", "value"):
        given = step.arguments[name]
        filler = torch.full((spare, *given.shape[1:]), torch.nan, dtype=given.dtype, device="cuda")
        step.arguments[name] = torch.cat((given, filler))
    if step.tree_mask is not None:
        zeros = step.tree_mask.new_zeros(spare, step.tree_mask.shape[1])
        step.tree_mask = torch.cat((step.tree_mask, zeros))
    status = new_status()
    out, lse = step.run(route="torch_flash", max_rows=4, status=status)
    assert status.tolist() == [0] * 8
    expect_right(step, out, lse, alone)


def test_a_mix_of_view_and_pages_is_told_of_and_ours_computes_it() -> None:
    shape = Shape([3, 2, 4], [90, 40, 130], dtype=torch.bfloat16, mask="tree", view="mixed_compact")
    steps = (make_step(shape, seed, "cuda") for seed in range(50))
    step = next(s for s in steps if sorted(s.options["view"].lens.sign().tolist()) == [-1, 1, 1])
    request = step.options["view"].lens.tolist().index(-1)
    status = new_status()
    assert_close(step, *step.run(status=status))
    assert status.tolist() == [0] * 8
    assert last_route().startswith("cuda")
    out, lse = step.run(route="torch_flash", max_rows=4, status=status)
    assert status[:3].tolist() == [3, request, -1]
    expect_right(step, out, lse, {b: step.only(b) for b in range(3) if b != request})


def test_a_mask_too_narrow_is_told_of(route: str) -> None:
    shape = Shape([3, 66], [90, 80], dtype=torch.bfloat16, mask="tree")
    step = make_step(shape, 71, "cuda")
    alone = {0: step.only(0)}
    step.tree_mask = step.tree_mask[:, :1].contiguous()
    status = new_status()
    out, lse = step.run(route=route, max_rows=66, status=status)
    assert status[:3].tolist() == [5, 1, 66]
    expect_right(step, out, lse, alone)


def test_compact_views_are_refused_by_kernels_without_them() -> None:
    require("flash_attn_3")
    shape = Shape([3], [90], dtype=torch.bfloat16, view="compact")
    with pytest.raises(NworError, match=r"(?s)^route: got 'flash_attn_3'.*missing.*compact view"):
        make_step(shape, 72, "cuda").run(route="flash_attn_3")


@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("rows", [[3, 3], [3, 2]])
def test_a_misaligned_compact_view_is_read(mask: str, rows: list[int]) -> None:
    shape = Shape(rows, [90, 40], dtype=torch.bfloat16, mask=mask, view="compact")
    step = make_step(shape, 73, "cuda")
    view = step.options["view"]
    step.options["view"] = CompactView(moved(view.keys), moved(view.values), view.lens)
    assert_close(step, *step.run(route="torch_flash", max_rows=3))
