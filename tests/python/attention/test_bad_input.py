"""Every wrong argument of the attention ops: NworError, named, and not a byte of out is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nwor_specpv import (
    CompactView,
    NworError,
    PartialView,
    merge_states,
    verify_attention,
    verify_plan,
)
from tests.python.attention.steps import DEVICES, FP8, Shape, Step, make_step, row_dtypes

INT32, INT64 = torch.int32, torch.int64
Arguments = dict[str, Any]
TENSORS = ["query", "key", "value", "key_cache", "value_cache"]
TENSORS += ["block_table", "prefix_lens", "query_start"]


def arguments_of(step: Step) -> Arguments:
    return {
        **step.arguments,
        "tree_mask": step.tree_mask,
        "scale": step.scale,
        **step.options,
        "out": torch.full_like(step.arguments["query"], 7.0),
    }


def good(device: str, **changes: Any) -> Arguments:
    shape = Shape([3, 2], [20, 5], dtype=row_dtypes(device)[0], mask="tree", **changes)
    return arguments_of(make_step(shape, 1, device))


def other_float(tensor: torch.Tensor) -> torch.Tensor:
    """The same in another dtype that rows may have."""
    wanted = torch.bfloat16 if tensor.dtype != torch.bfloat16 else torch.float16
    return tensor.to(wanted)


def set_item(tensor: torch.Tensor, index: Any, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


# name in the message -> what is changed: argument -> function of the good arguments
SHAPES: list[tuple[str, str, Callable[[Arguments], Any]]] = [
    ("query", "query", lambda a: a["query"][0]),
    ("query", "query", lambda a: a["query"].long()),
    ("query", "query", lambda a: a["query"][..., :60]),
    ("query", "query", lambda a: a["query"][:, :3]),  # heads do not divide
    ("query", "query", lambda a: a["query"][:, :0]),
    ("out", "query", lambda a: torch.cat([a["query"], a["query"]], dim=1)),
    ("key", "key", lambda a: a["key"][:4]),
    ("key", "key", lambda a: a["key"][:, :1]),
    ("key", "key", lambda a: a["key"][..., :32]),
    ("value", "value", lambda a: a["value"][:4]),
    ("value", "value", lambda a: other_float(a["value"])),
    ("key_cache", "key_cache", lambda a: a["key_cache"][0]),
    ("key_cache", "key_cache", lambda a: a["key_cache"].expand(2, *a["key_cache"].shape)),
    ("key_cache", "key_cache", lambda a: a["key_cache"][..., ::2]),
    ("value_cache", "value_cache", lambda a: a["value_cache"][1:]),
    ("value_cache", "value_cache", lambda a: other_float(a["value_cache"])),
    ("block_table", "block_table", lambda a: a["block_table"].long()),
    ("block_table", "block_table", lambda a: a["block_table"][0]),
    ("block_table", "block_table", lambda a: a["block_table"].t().contiguous().t()),
    ("prefix_lens", "prefix_lens", lambda a: a["prefix_lens"].long()),
    ("prefix_lens", "prefix_lens", lambda a: a["prefix_lens"][:1]),
    ("query_start", "query_start", lambda a: a["query_start"][:2]),
    ("query_start", "query_start", lambda a: a["query_start"].float()),
    ("tree_mask", "tree_mask", lambda a: a["tree_mask"].int()),
    ("tree_mask", "tree_mask", lambda a: a["tree_mask"][:4]),
    ("tree_mask", "tree_mask", lambda a: a["tree_mask"][:, :0]),
    ("scale", "scale", lambda a: float("nan")),
    ("scale", "scale", lambda a: float("inf")),
    ("scale", "scale", lambda a: 1e39),  # infinite as float32
    ("scale", "scale", lambda a: -1e39),
    ("softcap", "softcap", lambda a: -1.0),
    ("softcap", "softcap", lambda a: float("nan")),
    ("softcap", "softcap", lambda a: 1e39),
    ("softcap", "softcap", lambda a: 1e4),  # tanh of so little is rounded to nothing
    ("softcap", "softcap", lambda a: 1e-50),  # 0 as float32, which would be none
    ("softcap", "softcap", lambda a: 1e-40),
    ("window", "window", lambda a: -1),
    ("max_rows", "max_rows", lambda a: -1),
    ("k_scale", "k_scale", lambda a: torch.ones(1, device=a["query"].device)),  # not a float8 cache
    ("out", "out", lambda a: a["out"][:4]),
    ("out", "out", lambda a: other_float(a["out"])),
    ("out", "out", lambda a: torch.empty(5, 4, 128, dtype=a["out"].dtype).to(a["out"])[..., ::2]),
    ("out", "out", lambda a: a["out"][:1].expand(5, 4, 64)),
    ("out", "out", lambda a: a["out"].as_strided((5, 4, 64), (192, 64, 1))),
    ("out", "out", lambda a: a["query"]),
    ("status", "status", lambda a: torch.zeros(7, dtype=INT64, device=a["out"].device)),
    ("route", "route", lambda a: "fastest"),
    ("route", "route", lambda a: "cpu" if a["query"].is_cuda else "flash_attn_3"),
    ("view", "view", lambda a: "everything"),
]


def expect_refusal(name: str, arguments: Arguments, out: torch.Tensor) -> str:
    with pytest.raises(NworError) as refusal:
        verify_attention(**arguments)
    assert str(refusal.value).startswith(name), str(refusal.value)
    assert "got" in str(refusal.value)
    assert "expected" in str(refusal.value)
    assert (out == 7.0).all(), "out was written"
    return str(refusal.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_wrong_shapes_types_and_scalars(device: str, case: int) -> None:
    name, argument, change = SHAPES[case]
    arguments = good(device)
    out = arguments["out"]
    arguments[argument] = change(arguments)
    expect_refusal(name, arguments, out)


VALUES: list[tuple[str, str, Callable[[Arguments], Any]]] = [
    ("prefix_lens", "prefix_lens", lambda a: set_item(a["prefix_lens"], 0, -1)),
    # one token more than the table has room for
    (
        "prefix_lens",
        "prefix_lens",
        lambda a: set_item(a["prefix_lens"], 1, a["block_table"].shape[1] * 16 + 1),
    ),
    ("block_table", "block_table", lambda a: set_item(a["block_table"], (0, 1), -1)),
    (
        "block_table",
        "block_table",
        lambda a: set_item(a["block_table"], (1, 0), a["key_cache"].shape[0]),
    ),
    ("query_start", "query_start", lambda a: set_item(a["query_start"], 0, 1)),
    ("query_start", "query_start", lambda a: set_item(a["query_start"], 1, 6)),
    ("query_start", "query_start", lambda a: set_item(a["query_start"], 2, 4)),
    ("query_start", "query_start", lambda a: set_item(a["query_start"], 1, -2)),
]


@pytest.mark.parametrize("case", range(len(VALUES)))
def test_wrong_values_on_the_cpu(case: int) -> None:
    name, argument, change = VALUES[case]
    arguments = good("cpu")
    arguments[argument] = change(arguments)
    expect_refusal(name, arguments, arguments["out"])


@pytest.mark.parametrize(
    ("name", "index", "value"), [("prefix_lens", 0, -1), ("query_start", 1, 1)]
)
def test_wrong_values_without_rows_on_the_cpu(name: str, index: int, value: int) -> None:
    arguments = arguments_of(make_step(Shape([0, 0], [20, 5]), 1))
    arguments["out"] = torch.empty(0, 4, 64)
    verify_attention(**arguments)
    arguments[name] = set_item(arguments[name], index, value)
    expect_refusal(name, arguments, arguments["out"])


def test_a_scale_that_is_nothing_as_float32() -> None:
    """On the CPU any scale is served, on CUDA one above 0."""
    arguments = good("cpu")
    arguments["scale"] = 1e-60
    tiny = verify_attention(**arguments).clone()
    arguments["scale"] = 0.0
    assert torch.equal(tiny, verify_attention(**arguments))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-60])
def test_cuda_refuses_scales_that_are_not_above_0(scale: float) -> None:
    arguments = good("cuda")
    arguments["scale"] = scale
    expect_refusal("scale", arguments, arguments["out"])


def fused(arguments: Arguments, spare_heads: int = 0) -> torch.Tensor:
    """Puts query, key and value side by side into one buffer, which is returned."""
    parts = [arguments[name] for name in ("query", "key", "value")]
    rows, _, channels = parts[0].shape
    parts.append(parts[0].new_full((rows, spare_heads, channels), 7.0))
    buffer = torch.cat(parts, dim=1)
    first = 0
    for name in ("query", "key", "value"):
        heads = arguments[name].shape[1]
        arguments[name] = buffer[:, first : first + heads]
        first += heads
    return buffer


@pytest.mark.parametrize("device", DEVICES)
def test_out_among_slices_of_the_rows(device: str) -> None:
    """4 query heads, then 2 of K and 2 of V in a row: only what lies beside them is free."""
    expected = verify_attention(**good(device))
    for first, name in ((0, "query"), (1, "query"), (4, "key"), (5, "key"), (6, "value")):
        arguments = good(device)
        buffer = fused(arguments, spare_heads=2)
        before = buffer.clone()
        arguments["out"] = buffer[:, first : first + 4]
        with pytest.raises(NworError, match=f"^out: got memory that overlaps {name}, expected"):
            verify_attention(**arguments)
        assert torch.equal(buffer, before)
    arguments = good(device)
    buffer = fused(arguments, spare_heads=4)
    before = buffer.clone()
    arguments["out"] = buffer[:, 8:]
    assert torch.equal(verify_attention(**arguments), expected)
    assert torch.equal(buffer[:, :8], before[:, :8])


@pytest.mark.parametrize("device", DEVICES)
def test_out_beside_the_query_of_every_head(device: str) -> None:
    arguments = good(device)
    expected = verify_attention(**arguments).clone()
    pairs = torch.stack([arguments["query"], arguments["out"]], dim=2)
    arguments["query"], arguments["out"] = pairs[:, :, 0], pairs[:, :, 1]
    assert torch.equal(verify_attention(**arguments), expected)
    assert torch.equal(arguments["out"], expected)
    arguments["out"] = pairs[:, :, 0]
    with pytest.raises(NworError, match=r"^out: got memory that overlaps query"):
        verify_attention(**arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_out_shifted_against_the_query(device: str) -> None:
    """Rows of one are the next rows of the other."""
    arguments = good(device)
    room = torch.empty(6, 5, 64, dtype=arguments["query"].dtype, device=device)
    arguments["query"] = room[:5, :4].copy_(arguments["query"])
    arguments["out"] = room[1:, :4]
    with pytest.raises(NworError, match=r"^out: got memory that overlaps query"):
        verify_attention(**arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["keys", "values"])
def test_out_within_a_compact_view(device: str, name: str) -> None:
    arguments = good(device, view="compact")
    arguments["out"] = getattr(arguments["view"], name).as_strided((5, 4, 64), (256, 64, 1))
    with pytest.raises(NworError, match=f"^out: got memory that overlaps view.{name}, expected"):
        verify_attention(**arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_out_within_the_pages(device: str, name: str) -> None:
    """Pages have gaps here: those of K lie between those of V."""
    arguments = good(device, layout="kv_second")
    arguments["out"] = arguments[name].as_strided((5, 4, 64), (256, 64, 1))
    with pytest.raises(NworError, match=f"^out: got memory that overlaps {name}, expected"):
        verify_attention(**arguments)


def test_a_mask_too_narrow_for_the_rows() -> None:
    arguments = arguments_of(make_step(Shape([65], [3], mask="tree"), 2))
    arguments["tree_mask"] = arguments["tree_mask"][:, :1].contiguous()
    expect_refusal("tree_mask", arguments, arguments["out"])


VIEWS: list[tuple[str, Callable[[PartialView], PartialView]]] = [
    ("view.blocks", lambda v: PartialView(v.blocks.long(), v.num_blocks, v.view_lens, 16)),
    ("view.blocks", lambda v: PartialView(v.blocks[:, :1], v.num_blocks, v.view_lens, 16)),
    ("view.num_blocks", lambda v: PartialView(v.blocks, v.num_blocks[:1], v.view_lens, 16)),
    ("view.view_lens", lambda v: PartialView(v.blocks, v.num_blocks, v.view_lens.long(), 16)),
    ("view.block_size", lambda v: PartialView(v.blocks, v.num_blocks, v.view_lens, 12)),
    ("view.block_size", lambda v: PartialView(v.blocks, v.num_blocks, v.view_lens, 0)),
    ("view.block_size", lambda v: PartialView(v.blocks, v.num_blocks, v.view_lens, 32)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(VIEWS)))
def test_wrong_partial_views(device: str, case: int) -> None:
    name, change = VIEWS[case]
    arguments = good(device, view="partial")
    arguments["view"] = change(arguments["view"])
    expect_refusal(name, arguments, arguments["out"])


def test_wrong_values_in_a_partial_view_on_the_cpu() -> None:
    shape = Shape([3, 2], [200, 100], view="partial")
    for name, change in (
        ("view.num_blocks", lambda v: set_item(v.num_blocks, 0, v.blocks.shape[2] + 1)),
        ("view.view_lens", lambda v: set_item(v.view_lens, 0, int(v.num_blocks[0]) * 16 + 1)),
        ("view.view_lens", lambda v: set_item(v.view_lens, 0, -1)),
        ("view.blocks", lambda v: set_item(v.blocks, (0, 1, 0), 10_000)),
        ("view.blocks", lambda v: set_item(v.blocks, (0, 0, 0), -1)),
    ):
        step = next(s for s in (make_step(shape, seed) for seed in range(9)) if s.seen[0][0])
        arguments = arguments_of(step)
        setattr(arguments["view"], name.split(".")[1], change(arguments["view"]))
        expect_refusal(name, arguments, arguments["out"])


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_compact_views(device: str) -> None:
    for name, change in (
        ("view.keys", lambda v: CompactView(v.keys[:, :1], v.values, v.lens)),
        ("view.keys", lambda v: CompactView(other_float(v.keys), v.values, v.lens)),
        ("view.values", lambda v: CompactView(v.keys, v.values[:, :, 1:], v.lens)),
        ("view.lens", lambda v: CompactView(v.keys, v.values, v.lens[:1])),
        ("view.lens", lambda v: CompactView(v.keys, v.values, v.lens.float())),
    ):
        arguments = good(device, view="compact")
        arguments["view"] = change(arguments["view"])
        expect_refusal(name, arguments, arguments["out"])


def test_lengths_of_views_without_room_are_judged() -> None:
    arguments = good("cpu", view="compact")
    view = arguments["view"]
    empty, lens = view.keys[:, :, :0], torch.tensor([0, 5], dtype=INT32)
    arguments["view"] = CompactView(empty, empty, lens)
    expect_refusal("view.lens[1]: got 5", arguments, arguments["out"])
    arguments = good("cpu", view="partial")
    view = arguments["view"]
    none, one = torch.zeros(2, dtype=INT32), torch.tensor([0, 1], dtype=INT32)
    blocks = view.blocks[:, :, :0].contiguous()
    arguments["view"] = PartialView(blocks, one, none, 16)
    expect_refusal("view.num_blocks[1]: got 1", arguments, arguments["out"])
    arguments["view"] = PartialView(blocks, none, one, 16)
    expect_refusal("view.view_lens[1]: got 1", arguments, arguments["out"])


def test_a_compact_view_that_is_longer_than_its_memory() -> None:
    arguments = good("cpu", view="compact")
    view = arguments["view"]
    arguments["view"] = CompactView(view.keys, view.values, set_item(view.lens, 0, 21))
    expect_refusal("view.lens", arguments, arguments["out"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", ["partial", "compact"])
def test_a_window_together_with_a_view(device: str, view: str) -> None:
    arguments = good(device, view=view)
    arguments["window"] = 8
    expect_refusal("window", arguments, arguments["out"])


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_float8_scales(device: str) -> None:
    for name, scale in (
        ("k_scale", torch.ones(3, device=device)),
        ("v_scale", torch.ones(2, 1, device=device)),
        ("k_scale", torch.ones(1, device=device, dtype=torch.float64)),
        ("v_scale", torch.ones(4, device=device)[::2]),
    ):
        arguments = good(device, cache_dtype=FP8)
        arguments[name] = scale
        expect_refusal(name, arguments, arguments["out"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name",
    [
        "query",
        "key",
        "value",
        "key_cache",
        "value_cache",
        "block_table",
        "prefix_lens",
        "query_start",
    ],
)
def test_a_tensor_on_the_wrong_device(name: str) -> None:
    arguments = good("cuda")
    arguments[name] = arguments[name].cpu()
    with pytest.raises(NworError):
        verify_attention(**arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_no_cuda_route_serves_is_answered_with_the_feature_table() -> None:
    arguments = arguments_of(make_step(Shape([2], [9], dtype=torch.float32), 1, "cuda"))
    with pytest.raises(NworError) as refusal:
        verify_attention(**arguments)
    text = str(refusal.value)
    assert "required: " in text
    assert "float32 rows" in text
    for route in ("cpu", "cuda", "torch_flash", "flash_attn_2", "flash_attn_3"):
        assert f"\n{route}" in text
    assert "missing" in text


def test_a_wanted_route_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = good("cpu")
    monkeypatch.setenv("NWOR_SPECPV_ATTENTION_ROUTE", "cuda")
    text = expect_refusal("route", arguments, arguments["out"])
    assert "cuda: supports" in text or "cuda (absent): supports" in text
    monkeypatch.setenv("NWOR_SPECPV_ATTENTION_ROUTE", "auto")
    verify_attention(**arguments)
    # The argument goes before the variable.
    monkeypatch.setenv("NWOR_SPECPV_ATTENTION_ROUTE", "cuda")
    verify_attention(**arguments, route="cpu")


def test_wrong_plans() -> None:
    arguments = good("cpu")
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start", "tree_mask")
    planned = {name: arguments[name] for name in names}
    assert verify_plan(**planned).numel() == 0
    for plan in (torch.empty(1, dtype=torch.uint8), torch.empty(0)):
        with pytest.raises(NworError, match=r"^plan: got"):
            verify_plan(**planned, plan=plan)
    planned["query"] = arguments["query"][0]
    with pytest.raises(NworError, match=r"^query: got"):
        verify_plan(**planned)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_plan_that_kernels_cannot_serve_names_the_argument() -> None:
    names = ("query", "key_cache", "block_table", "prefix_lens", "query_start")
    for changes, message in (
        ({"page_size": 24}, "key_cache: got pages of 24 tokens, expected a page size"),
        ({"head_dim": 72}, "query: got 72 channels, expected head size"),
    ):
        arguments = good("cuda", **changes)
        with pytest.raises(NworError, match=f"^{message}"):
            verify_plan(**{name: arguments[name] for name in names})


def test_wrong_states() -> None:
    out, lse = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    for name, outs, lses in (
        ("outs", [], []),
        ("lses", [out, out], [lse]),
        ("outs[0]", [out[0]], [lse]),
        ("outs[0]", [out.long()], [lse]),
        ("outs[1]", [out, out[:2]], [lse, lse]),
        ("outs[1]", [out, out.half()], [lse, lse]),
        ("lses[1]", [out, out], [lse, lse[:, :1]]),
        ("lses[0]", [out], [lse.double()]),
        ("outs[0]", [out[..., :0]], [lse]),
    ):
        with pytest.raises(NworError) as refusal:
            merge_states(outs, lses)
        assert str(refusal.value).startswith(name), str(refusal.value)
