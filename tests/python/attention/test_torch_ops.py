"""The ops as torch sees them: schemas, fake kernels, torch.compile, CUDA graphs, routes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nwor_specpv import (
    CompactView,
    PartialView,
    merge_states,
    verify_attention,
    verify_plan,
)
from nwor_specpv.bench.timing import capture
from nwor_specpv.ops import attention as attention_module
from tests.python.attention.steps import DEVICES, Shape, Step, assert_close, make_step, row_dtypes

OPS = torch.ops.nwor_specpv
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def op_arguments(step: Step) -> tuple[tuple, dict]:
    names = ("query", "key", "value", "key_cache", "value_cache", "block_table", "prefix_lens")
    given = [step.arguments[name] for name in (*names, "query_start")]
    query = step.arguments["query"]
    out = torch.zeros_like(query)
    lse = torch.zeros(query.shape[:2], device=query.device)
    options = {key: value for key, value in step.options.items() if key != "view"}
    options.update(attention_module._flatten(step.options.get("view")))
    return (*given, step.tree_mask, step.scale, out, lse), options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", ["none", "partial", "compact"])
def test_opcheck_verify_attention(device: str, view: str) -> None:
    shape = Shape([3, 2], [40, 20], dtype=row_dtypes(device)[0], mask="tree", view=view)
    args, kwargs = op_arguments(make_step(shape, 1, device))
    torch.library.opcheck(OPS.verify_attention.default, args, kwargs)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_verify_plan_and_merge_states(device: str) -> None:
    step = make_step(Shape([3, 2], [40, 20], dtype=row_dtypes(device)[0], mask="tree"), 1, device)
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    given = tuple(step.arguments[name] for name in names)
    plan = verify_plan(*given, step.tree_mask)
    # A plan holds scratch that no one promises the contents of, so outputs are not compared.
    utils = ("test_schema", "test_faketensor") if device == "cpu" else ("test_faketensor",)
    torch.library.opcheck(OPS.verify_plan.default, (*given, step.tree_mask, plan), test_utils=utils)
    outs = [torch.randn(3, 2, 8, device=device) for _ in range(3)]
    lses = [torch.randn(3, 2, device=device) for _ in range(3)]
    torch.library.opcheck(OPS.merge_states.default, (outs, lses))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(device: str, dynamic: bool) -> None:
    step = make_step(Shape([3, 2], [40, 20], dtype=row_dtypes(device)[0], mask="tree"), 1, device)

    def layer(arguments: dict[str, torch.Tensor], mask: torch.Tensor, scale: float):
        out, lse = verify_attention(**arguments, tree_mask=mask, scale=scale, return_lse=True)
        both, total = merge_states([out, out], [lse, lse])
        return both * 2, total

    expected = layer(step.arguments, step.tree_mask, step.scale)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for got, wanted in zip(
        compiled(step.arguments, step.tree_mask, step.scale), expected, strict=True
    ):
        assert torch.equal(got, wanted)


def test_compiles_whole_with_views() -> None:
    for view in ("partial", "compact"):
        step = make_step(Shape([3, 2], [64, 32], view=view), 2)

        def layer(arguments: dict[str, torch.Tensor], view: PartialView | CompactView):
            return verify_attention(**arguments, tree_mask=None, scale=0.1, view=view)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        given = step.options["view"]
        assert torch.equal(compiled(step.arguments, given), layer(step.arguments, given))


def test_fake_tensors_give_shapes_and_touch_nothing() -> None:
    with FakeTensorMode():
        query = torch.empty(5, 4, 64, dtype=torch.bfloat16, device="cuda")
        rows = torch.empty(5, 2, 64, dtype=torch.bfloat16, device="cuda")
        cache = torch.empty(9, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        table = torch.empty(2, 3, dtype=torch.int32, device="cuda")
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        out, lse = verify_attention(
            query, rows, rows, cache, cache, table, lengths, starts, None, 1.0, return_lse=True
        )
        assert (out.shape, out.dtype, out.device.type) == (query.shape, query.dtype, "cuda")
        assert (lse.shape, lse.dtype) == ((5, 4), torch.float32)
        merged, total = merge_states([out, out], [lse, lse])
        assert (merged.shape, total.shape) == (out.shape, lse.shape)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_serves_every_layer(device: str) -> None:
    shape = Shape([3, 2], [700, 20], dtype=row_dtypes(device)[0], mask="tree")
    step = make_step(shape, 3, device)
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    plan = verify_plan(*(step.arguments[name] for name in names), step.tree_mask)
    for _ in range(3):
        out, lse = step.run(plan=plan)
        assert_close(step, out, lse)
        step.arguments["query"] = -step.arguments["query"]


def test_status_names_the_routes_and_the_one_taken() -> None:
    make_step(Shape([1], [3]), 1).run()
    report = attention_module.route_report()
    assert report["cpu"].startswith("present: ")
    assert report["last taken"].startswith("cpu")
    assert set(report) == {
        "cpu", "cuda", "torch_flash", "flash_attn_2", "flash_attn_3", "last taken",
    }  # fmt: skip


@cuda_only
@pytest.mark.parametrize("planned", [False, True])
def test_a_graph_replays_with_other_lengths(planned: bool) -> None:
    shape = Shape([4, 4], [1500, 900], heads=8, dtype=torch.bfloat16, mask="tree", poison=False)
    step = make_step(shape, 4, "cuda")
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    given = tuple(step.arguments[name] for name in names)
    out = torch.zeros_like(step.arguments["query"])
    plan = verify_plan(*given, step.tree_mask) if planned else None

    def run() -> None:
        if plan is not None:
            verify_plan(*given, step.tree_mask, plan=plan)
        step.run(out=out, plan=plan, return_lse=False)

    graph = capture(run)
    for lengths in ([1500, 900], [0, 1], [1499, 17], [512, 513], [16, 900]):
        short = step.with_lengths(lengths)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(short, out)


def plan_of(step: Step, status: torch.Tensor) -> torch.Tensor:
    """The step's plan, made with its lengths of now."""
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    given = (step.arguments[name] for name in names)
    return verify_plan(*given, step.tree_mask, view=step.options.get("view"), status=status)


@cuda_only
@pytest.mark.parametrize("with_plan", [False, True])
def test_the_status_word_tells_of_lengths_beyond_the_table(with_plan: bool) -> None:
    step = make_step(Shape([2, 2], [40, 20], dtype=torch.float16, poison=False), 5, "cuda")
    status = torch.zeros(8, dtype=torch.int64, device="cuda")
    step.run(status=status, plan=plan_of(step, status) if with_plan else None)
    assert status.tolist() == [0] * 8
    room = step.arguments["block_table"].shape[1] * 16
    step.arguments["prefix_lens"][1] = room + 7
    step.run(status=status, plan=plan_of(step, status) if with_plan else None)
    code, request, value, *_ = status.tolist()
    assert (code, request, value) == (1, 1, room + 7)


@cuda_only
def test_a_captured_plan_tells_of_lengths_beyond_the_table() -> None:
    step = make_step(Shape([2, 2], [40, 20], dtype=torch.float16, poison=False), 5, "cuda")
    status = torch.zeros(8, dtype=torch.int64, device="cuda")
    plan = plan_of(step, status)
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    given = [step.arguments[name] for name in names]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify_plan(*given, step.tree_mask, plan=plan, status=status)
        step.run(plan=plan, status=status)
    graph.replay()
    assert status.tolist() == [0] * 8
    room = step.arguments["block_table"].shape[1] * 16
    step.arguments["prefix_lens"][0] = room + 1
    graph.replay()
    assert status[:3].tolist() == [1, 0, room + 1]


@cuda_only
@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize(
    ("fault", "code"),
    [("rows", 2), ("blocks", 3), ("view", 3), ("compact", 3), ("page", 4), ("mask", 5)],
)
def test_the_status_word_tells_of_every_other_fault(fault: str, code: int, with_plan: bool) -> None:
    """Nothing out of bounds is read, and the other request is computed as if nothing were wrong."""
    view = {"blocks": "partial", "view": "partial", "compact": "compact"}.get(fault, "none")
    rows = [3, 66] if fault == "mask" else [3, 2]
    shape = Shape(rows, [90, 80], dtype=torch.float16, view=view, mask="tree", poison=False)
    step = make_step(shape, 5, "cuda")
    expected = step.run()[0]
    given, chosen = step.arguments, step.options.get("view")
    if fault == "rows":
        given["query_start"][2] = 7
    elif fault == "blocks":
        chosen.num_blocks[1] = chosen.blocks.shape[2] + 1
    elif fault == "view":
        chosen.view_lens[1] = chosen.num_blocks[1] * 16 + 1
    elif fault == "compact":
        chosen.lens[1] = chosen.keys.shape[2] + 1
    elif fault == "page":
        given["block_table"][1, 2] = given["key_cache"].shape[0]
    else:
        step.tree_mask = step.tree_mask[:, :1].contiguous()
    status = torch.zeros(8, dtype=torch.int64, device="cuda")
    out = step.run(status=status, plan=plan_of(step, status) if with_plan else None)[0]
    assert status[:2].tolist() == [code, 1]
    assert torch.equal(out[:3], expected[:3])


@cuda_only
@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("view", ["none", "compact"])
@pytest.mark.parametrize("rows", [[5, 5], [3, 8]])
def test_torchs_flash_attention_agrees(mask: str, view: str, rows: list[int]) -> None:
    shape = Shape(rows, [300, 40], heads=8, kv_heads=2, dtype=torch.bfloat16, mask=mask, view=view)
    step = make_step(shape, 6, "cuda")
    out, lse = step.run(route="torch_flash", max_rows=max(rows))
    assert_close(step, out, lse)
    assert attention_module.last_route().startswith("torch_flash")


def test_the_last_route_is_told_with_the_reason_of_the_last_call() -> None:
    step = make_step(Shape([2], [5], heads=4, kv_heads=2), 6, "cpu")
    step.run(route="cpu")
    assert attention_module.last_route() == "cpu (requested by name)"
    step.run()
    assert attention_module.last_route() == "cpu (tensors on the cpu)"


@cuda_only
def test_prefill_goes_to_flash_attention() -> None:
    shape = Shape([300, 2], [70, 40], heads=4, kv_heads=2, dtype=torch.bfloat16)
    step = make_step(shape, 7, "cuda")
    out, lse = step.run(max_rows=300)
    assert_close(step, out, lse)
    assert "flash" in attention_module.last_route()
    ours, _ = step.run(max_rows=300, route="cuda")
    assert_close(step, ours)


@cuda_only
def test_error_is_at_most_that_of_flash_attention() -> None:
    shape = Shape([1], [4000], heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16)
    step = make_step(shape, 8, "cuda")
    expected = torch.from_numpy(step.reference()[0]).cuda()
    errors = {
        route: (step.run(route=route)[0].double() - expected).abs().mean().item()
        for route in ("cuda", "torch_flash")
    }
    assert errors["cuda"] <= 1.05 * errors["torch_flash"], errors
