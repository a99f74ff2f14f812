"""What docs/attention.md promises of shapes, memory and batches, each by a step made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nwor_specpv import CompactView, NworError, PartialView
from nwor_specpv.ops.attention import last_route
from tests.python.attention.steps import (
    DEVICES,
    FP8,
    HEAD_DIMS,
    LAYOUTS,
    Shape,
    Step,
    assert_close,
    make_step,
    moved,
    row_dtypes,
)

PAGE_SIZES = (16, 32, 64, 128, 256, 1040)
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size_with_every_page_size_layout_and_dtype(device: str, head_dim: int) -> None:
    """Each page size once, and among them each layout, each dtype and a float8 cache."""
    for i, page_size in enumerate(PAGE_SIZES):
        dtypes = row_dtypes(device)
        shape = Shape(
            rows=[2, 1],
            prefix=[page_size + 3, 2 * page_size if page_size < 200 else 40],
            heads=6,
            kv_heads=2,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtypes[i % len(dtypes)],
            cache_dtype=FP8 if i % 3 == 2 else None,
            scales="head" if i == 2 else "none",
            layout=LAYOUTS[i % len(LAYOUTS)],
            mask="tree",
        )
        step = make_step(shape, 100 * head_dim + i, device)
        assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [1, 2, 3, 4, 5])
def test_every_length_up_to_a_block_and_beyond(device: str, packed: int) -> None:
    """Tiles of one to four packed rows and of two leave other remainders of tokens each."""
    for prefix in range(71):
        shape = Shape([1], [prefix], heads=packed, kv_heads=1, dtype=row_dtypes(device)[0])
        step = make_step(shape, prefix, device)
        assert_close(step, *step.run())


def reordered(step: Step, order: list[int]) -> Step:
    """The step with its requests in another order, in the same caches."""
    starts = step.arguments["query_start"].tolist()
    device = step.arguments["query"].device
    rows = [t for b in order for t in range(starts[b], starts[b + 1])]
    arguments = dict(step.arguments)
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name][rows]
    for name in ("block_table", "prefix_lens"):
        arguments[name] = arguments[name][order]
    lengths = [starts[b + 1] - starts[b] for b in order]
    arguments["query_start"] = torch.tensor(
        [sum(lengths[:i]) for i in range(len(order) + 1)], dtype=torch.int32, device=device
    )
    view = step.options.get("view")
    options = dict(step.options)
    if isinstance(view, PartialView):
        options["view"] = PartialView(
            view.blocks[order], view.num_blocks[order], view.view_lens[order], view.block_size
        )
    if isinstance(view, CompactView):
        options["view"] = CompactView(view.keys[order], view.values[order], view.lens[order])
    return replace(step, arguments=arguments, tree_mask=step.tree_mask[rows], options=options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", ["mixed_partial", "mixed_compact"])
def test_whole_prefixes_and_views_in_any_order_of_requests(device: str, view: str) -> None:
    """The mix is that of each alone; order and repetition of requests change no bit."""
    shape = Shape(
        rows=[3, 1, 9, 2],
        prefix=[700, 64, 130, 1100],
        heads=6,
        kv_heads=2,
        dtype=row_dtypes(device)[-1],
        mask="tree",
        view=view,
    )
    steps = (make_step(shape, seed, device) for seed in range(50))
    counts = "num_blocks" if view == "mixed_partial" else "lens"

    def mixed(step: Step) -> bool:
        used = getattr(step.options["view"], counts)
        return bool((used > 0).any() and (used == -1).any())

    step = next(s for s in steps if mixed(s))
    out, lse = step.run()
    assert_close(step, out, lse)
    starts = step.arguments["query_start"].tolist()
    for order in ([3, 2, 1, 0], [1, 3, 0, 2], [2, 2, 0, 3, 1, 0]):
        rows = [t for b in order for t in range(starts[b], starts[b + 1])]
        again, again_lse = reordered(step, order).run()
        assert torch.equal(again, out[rows]), order
        assert torch.equal(again_lse, lse[rows]), order


# Packed rows choose the row tile: 16, 32, 64 or 128. Over a float8 cache two warps share a stream
# of tokens from 64 rows on, with heads of more than 128 channels from 32 on.
BATCHES = [
    *[(rows, 16, 128, None) for rows in (1, 8, 16)],
    (40, 4, 128, None),
    *[(rows, 16, 128, FP8) for rows in (1, 8, 16)],
    (40, 4, 128, FP8),
    *[(rows, 16, dim, FP8) for dim in (64, 80, 96, 192, 256) for rows in (2, 8, 13)],
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "heads", "head_dim", "cache_dtype"), BATCHES)
def test_a_batch_that_fills_the_device_changes_no_bit(
    device: str, rows: int, heads: int, head_dim: int, cache_dtype: torch.dtype | None
) -> None:
    """Some of its requests are a work item each, others several, and a CTA takes many in turn."""
    shape = Shape(
        rows=[rows, 3, rows],
        prefix=[1700, 0, 300],
        heads=heads,
        kv_heads=4,
        head_dim=head_dim,
        dtype=row_dtypes(device)[-1],
        cache_dtype=cache_dtype,
        scales="head" if cache_dtype is FP8 and rows == 8 else "none",
        mask="tree",
    )
    step = make_step(shape, rows, device)
    out, lse = step.run()
    assert_close(step, out, lse)
    starts = step.arguments["query_start"].tolist()
    for copies in (2,) if device == "cpu" else (2, 24, 70):
        order = [0, 1, 2] * copies
        at = [t for b in order for t in range(starts[b], starts[b + 1])]
        again, again_lse = reordered(step, order).run()
        assert torch.equal(again, out[at]), copies
        assert torch.equal(again_lse, lse[at]), copies


@pytest.mark.parametrize("device", DEVICES)
def test_few_rows_do_not_feel_a_batch_of_many(device: str) -> None:
    """Theirs is a kernel with fewer CTAs, but each prefix is cut as it is alone."""
    shape = Shape(
        rows=[64, 2, 64],
        prefix=[100, 8192, 33],
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=row_dtypes(device)[-1],
        mask="tree",
    )
    step = make_step(shape, 7, device)
    out, lse = step.run()
    assert_close(step, out, lse)
    own = slice(64, 66)
    alone, alone_lse = step.only(1).run()
    assert torch.equal(alone, out[own])
    assert torch.equal(alone_lse, lse[own])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [3, 6, 14])
def test_float8_repeats_bit_for_bit_alone_and_in_a_batch(
    device: str, head_dim: int, rows: int
) -> None:
    """Every row tile; leaves of one prefix on several CTAs; the hint of rows chooses another."""
    shape = Shape(
        rows=[rows, 1, rows],
        prefix=[2600, 700, 33],
        heads=8,
        kv_heads=2,
        head_dim=head_dim,
        dtype=row_dtypes(device)[-1],
        cache_dtype=FP8,
        scales="tensor",
        mask="tree",
    )
    step = make_step(shape, head_dim + rows, device)
    out, lse = step.run()
    assert_close(step, out, lse)
    for changes in ({}, {}, {"max_rows": 1}, {"max_rows": 70}):
        again, again_lse = step.run(**changes)
        assert torch.equal(again, out), changes
        assert torch.equal(again_lse, lse), changes
    starts = step.arguments["query_start"].tolist()
    for request in range(3):
        own = slice(starts[request], starts[request + 1])
        alone, alone_lse = step.only(request).run()
        assert torch.equal(alone, out[own]), request
        assert torch.equal(alone_lse, lse[own]), request


@pytest.mark.parametrize("view", ["none", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_memory_aligned_to_an_element_gives_the_same_bits(dtype: torch.dtype, view: str) -> None:
    shape = Shape([3, 2], [150, 40], dtype=dtype, mask="tree", view=view, layout="packed")
    step = make_step(shape, 7)
    expected = step.run()
    for name in ("query", "key", "value", "key_cache", "value_cache"):
        step.arguments[name] = moved(step.arguments[name])
        assert step.arguments[name].data_ptr() % 16 != 0
    if view == "compact":
        given = step.options["view"]
        step.options["view"] = CompactView(moved(given.keys), moved(given.values), given.lens)
    got = step.run(out=moved(torch.zeros_like(expected[0])))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with channels that others follow: rows begin at odd multiples of 8 bytes."""
    more = 8 // tensor.element_size()
    memory = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + more, dtype=tensor.dtype)
    return memory.to(tensor.device)[..., :-more].copy_(tensor)


MISALIGNED = pytest.mark.parametrize("misaligned", [moved, spread])
ROWS = ("query", "key", "value")
CACHES = ("key_cache", "value_cache")


@cuda_only
@MISALIGNED
@pytest.mark.parametrize("view", ["none", "partial", "compact"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_reads_misaligned_rows_and_views(
    misaligned: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, view: str
) -> None:
    shape = Shape([3, 2], [150, 40], dtype=dtype, mask="tree", view=view, layout="packed")
    step = make_step(shape, 7, "cuda")
    expected = step.run()
    for name in ROWS:
        step.arguments[name] = misaligned(step.arguments[name])
    if view == "compact":
        given = step.options["view"]
        keys, values = misaligned(given.keys), misaligned(given.values)
        step.options["view"] = CompactView(keys, values, given.lens)
    for got, wanted in zip(step.run(), expected, strict=True):
        assert torch.equal(got, wanted)
    assert last_route().startswith("cuda")


@cuda_only
@MISALIGNED
@pytest.mark.parametrize("names", [CACHES, CACHES[:1], CACHES[1:], ("out",), (*CACHES, "out")])
def test_cuda_copies_misaligned_caches_for_chains_and_refuses_them_for_trees(
    misaligned: Callable[[torch.Tensor], torch.Tensor], names: tuple[str, ...]
) -> None:
    """LibTorch's FlashAttention gets a copy of the pages; rows of a tree need our kernels."""
    chain = make_step(Shape([3, 2], [150, 40], dtype=torch.bfloat16), 7, "cuda")
    tree = make_step(Shape([3, 2], [150, 40], dtype=torch.bfloat16, mask="tree"), 7, "cuda")
    outs = {}
    for step in (chain, tree):
        out = torch.full_like(step.arguments["query"], 7.0)
        outs[step.shape.mask] = misaligned(out) if "out" in names else out
        for name in names:
            if name != "out":
                step.arguments[name] = misaligned(step.arguments[name])
    assert_close(chain, *chain.run(out=outs["causal"], max_rows=3))
    assert last_route() == "torch_flash (our kernels do not serve this request)"
    for step, route in ((tree, "auto"), (tree, "cuda"), (chain, "cuda")):
        out = outs[step.shape.mask].fill_(7.0)
        with pytest.raises(NworError) as refusal:
            step.run(out=out, route=route)
        assert "missing memory that is not 16-byte aligned" in str(refusal.value)
        assert "expected 16-byte alignment (as of a clone)" in str(refusal.value)
        assert (out == 7.0).all()


@cuda_only
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_cuda_refuses_misaligned_float8_caches(head_dim: int) -> None:
    shape = Shape([3], [150], dtype=torch.bfloat16, cache_dtype=FP8, head_dim=head_dim)
    step = make_step(shape, 7, "cuda")
    assert_close(step, *step.run())
    step.arguments["value_cache"] = moved(step.arguments["value_cache"])
    with pytest.raises(NworError, match="rows that are not 16-byte aligned"):
        step.run()


@cuda_only
@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("rows", [255, 256, 257])
def test_cuda_computes_256_rows_and_leaves_more_to_prefill(
    rows: int, cache_dtype: torch.dtype | None, mask: str
) -> None:
    shape = Shape(
        rows=[rows, 2, rows],
        prefix=[130, 700, 0],
        heads=4,
        kv_heads=1,
        head_dim=128,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        mask=mask,
    )
    step = make_step(shape, rows, "cuda")
    status = torch.zeros(8, dtype=torch.int64, device="cuda")
    out, lse = step.run(max_rows=rows, status=status)
    assert_close(step, out, lse)
    assert status.tolist() == [0] * 8
    is_prefill = rows > 256 and mask == "causal" and cache_dtype is None
    assert last_route().startswith("cuda") != is_prefill, last_route()
    ours, ours_lse = step.run(max_rows=rows, route="cuda")
    if is_prefill:
        assert_close(step, ours, ours_lse)
    else:
        assert torch.equal(ours, out)
        assert torch.equal(ours_lse, lse)
    starts = step.arguments["query_start"].tolist()
    for request in range(3):
        own = slice(starts[request], starts[request + 1])
        alone, alone_lse = step.only(request).run(route="cuda")
        assert torch.equal(alone, ours[own]), request
        assert torch.equal(alone_lse, ours_lse[own]), request


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_on_the_cpu_is_at_most_that_of_torchs_attention(dtype: torch.dtype) -> None:
    """Mean and largest error, against float64, of the same rows over the same tokens."""
    shape = Shape([1], [1500], heads=8, kv_heads=2, dtype=dtype, head_dim=128, poison=False)
    step = make_step(shape, 8)
    slots = torch.tensor(step.seen[0][0])
    keys, values = (
        torch.cat([step.arguments[cache].flatten(0, 1)[slots], step.arguments[rows]]).transpose(
            0, 1
        )[None]
        for cache, rows in (("key_cache", "key"), ("value_cache", "value"))
    )
    query = step.arguments["query"].transpose(0, 1)[None]
    theirs = scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0].transpose(0, 1)
    expected = torch.from_numpy(step.reference()[0])
    ours, their = ((out.double() - expected).abs() for out in (step.run()[0], theirs))
    assert ours.mean() <= 1.05 * their.mean(), (ours.mean(), their.mean())
    assert ours.max() <= 1.25 * their.max(), (ours.max(), their.max())
