"""verify_attention against an fp64 reference, over random steps and at the edges."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from nwor_specpv import CompactView, PartialView, merge_states, verify_attention
from tests.python.attention.steps import (
    DEVICES,
    FP8,
    HEAD_DIMS,
    LAYOUTS,
    SEED,
    Shape,
    assert_close,
    make_step,
    row_dtypes,
)

RANDOM_STEPS = 60


def random_shape(seed: int, device: str) -> Shape:
    rng = random.Random(seed)
    requests = rng.randint(1, 4)
    group = rng.choice((1, 1, 2, 3, 4, 5, 8))
    kv_heads = rng.choice((1, 2, 3))
    view = rng.choice(("none", "none", "partial", "compact", "mixed_partial", "mixed_compact"))
    page_size = rng.choice((16, 32, 64, 128, 48))
    dtype = rng.choice(row_dtypes(device))
    fp8 = rng.random() < 0.25
    return Shape(
        rows=[rng.choice((0, 1, 1, 2, 5, 8, 17, 33, 70)) for _ in range(requests)],
        prefix=[
            rng.choice((0, 1, 16, rng.randint(1, 200), rng.randint(500, 1100)))
            for _ in range(requests)
        ],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=rng.choice(HEAD_DIMS),
        page_size=page_size,
        dtype=dtype,
        cache_dtype=FP8 if fp8 else None,
        layout=rng.choice(LAYOUTS),
        mask=rng.choice(("causal", "tree", "chain", "random")),
        view=view,
        block_size=16 if page_size != 128 else rng.choice((16, 32, 64, 128)),
        scales=rng.choice(("none", "tensor", "head")) if fp8 else "none",
        window=rng.choice((0, 0, 1, 7, 100, 600)) if view == "none" else 0,
        softcap=rng.choice((0.0, 0.0, 5.0, 30.0)),
        scale=rng.choice((None, 0.3)),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(RANDOM_STEPS))
def test_random_step_equals_the_reference(device: str, case: int) -> None:
    seed = SEED + case
    shape = random_shape(seed, device)
    print(f"seed={SEED} case={case} {shape}")
    step = make_step(shape, seed, device)
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 63, 64, 65, 127, 511, 512, 513, 1024, 1600])
def test_lengths_at_page_block_and_split_boundaries(device: str, prefix: int) -> None:
    dtype = row_dtypes(device)[0]
    step = make_step(Shape([3, 1], [prefix, 5], dtype=dtype, mask="tree"), prefix, device)
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefix", [383, 384, 385, 768, 6144, 6145, 12289, 24576, 24577])
def test_lengths_where_leaves_of_eight_heads_change(device: str, prefix: int) -> None:
    """Of the tile kernels; as many leaves as fill the device, then more, and their groups."""
    dtype = row_dtypes(device)[1]
    shape = Shape([2, 5], [prefix, 40], heads=8, kv_heads=8, dtype=dtype, mask="tree")
    step = make_step(shape, prefix, device)
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefix", [511, 513, 8192, 8193, 32768, 32769])
@pytest.mark.parametrize("rows", [1, 17])
def test_lengths_where_leaves_of_float8_caches_change(device: str, prefix: int, rows: int) -> None:
    dtype = row_dtypes(device)[1]
    shape = Shape([rows], [prefix], heads=8, kv_heads=8, dtype=dtype, cache_dtype=FP8)
    step = make_step(shape, prefix, device)
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [63, 64, 65, 128, 200, 255, 256, 257, 300])
@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_many_rows(device: str, rows: int, mask: str) -> None:
    dtype = row_dtypes(device)[0]
    shape = Shape([rows, 2], [40, 3], heads=4, kv_heads=1, dtype=dtype, mask=mask)
    step = make_step(shape, rows, device)
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
def test_prefill_without_prefix(device: str) -> None:
    dtype = row_dtypes(device)[0]
    step = make_step(Shape([600], [0], heads=3, kv_heads=1, dtype=dtype), 11, device)
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_see_nothing_get_zeros_and_minus_infinity(device: str) -> None:
    step = make_step(Shape([4, 2], [0, 20], dtype=row_dtypes(device)[0], mask="chain"), 3, device)
    step.tree_mask[1] = 0
    step.visible[0][1] = set()
    out, lse = step.run()
    assert torch.count_nonzero(out[1]) == 0
    assert torch.isneginf(lse[1]).all()
    assert_close(step, out, lse)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_no_requests(device: str) -> None:
    step = make_step(Shape([0, 0], [4, 0], dtype=row_dtypes(device)[0]), 1, device)
    out, lse = step.run()
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
    empty = dict(step.arguments)
    empty["block_table"], empty["prefix_lens"] = empty["block_table"][:0], empty["prefix_lens"][:0]
    empty["query_start"] = empty["query_start"][:1]
    assert verify_attention(**empty, tree_mask=None, scale=1.0).shape == (0, 4, 64)


@pytest.mark.parametrize("device", DEVICES)
def test_what_requests_without_rows_say_is_not_looked_at(device: str) -> None:
    """Their tables and lists name no page; the others are computed, and nobody is told."""
    for view in ("none", "partial"):
        shape = Shape([0, 3, 0], [40, 70, 33], dtype=row_dtypes(device)[0], view=view)
        steps = (make_step(shape, seed, device) for seed in range(50))
        used = "num_blocks" if view == "partial" else None
        step = next(s for s in steps if not used or (s.options["view"].num_blocks > 0).all())
        expected = step.run()
        step.arguments["block_table"][0::2] = -1
        if view == "partial":
            step.options["view"].blocks[0::2] = -1
        status = torch.zeros(8, dtype=torch.int64, device=device)
        for got, wanted in zip(step.run(status=status), expected, strict=True):
            assert torch.equal(got, wanted)
        assert status.tolist() == [0] * 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("view", ["partial", "compact"])
def test_a_view_without_room_shows_nothing(
    device: str, cache_dtype: torch.dtype | None, view: str
) -> None:
    """Requests that use it see their own rows alone, the others their whole prefix."""
    shape = Shape([3, 2, 4], [90, 40, 0], dtype=row_dtypes(device)[-1], cache_dtype=cache_dtype)
    step = make_step(shape, 4, device)
    dtype, dim = shape.dtype, shape.head_dim
    uses = torch.tensor([0, -1, 0], dtype=torch.int32, device=device)
    if view == "partial":
        blocks = torch.empty(3, 2, 0, dtype=torch.int32, device=device)
        step.options["view"] = PartialView(blocks, uses, torch.zeros_like(uses), 16)
    else:
        tokens = torch.empty(3, 2, 0, dim, dtype=dtype, device=device)
        step.options["view"] = CompactView(tokens, tokens.clone(), uses)
    step.seen[0] = [[], []]
    out, lse = step.run()
    assert_close(step, out, lse)
    # The same as one with room that shows nothing.
    if view == "partial":
        blocks = torch.full((3, 2, 1), -1, dtype=torch.int32, device=device)
        step.options["view"] = PartialView(blocks, uses, torch.zeros_like(uses), 16)
    else:
        tokens = torch.full((3, 2, 1, dim), torch.nan, dtype=dtype, device=device)
        step.options["view"] = CompactView(tokens, tokens.clone(), uses)
    for got, expected in zip(step.run(), (out, lse), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("own", [(1, 2), (3, 1), (1, 1)])
def test_a_compact_view_that_requests_or_heads_share(
    device: str, cache_dtype: torch.dtype | None, own: tuple[int, int]
) -> None:
    """Strides of 0 read what a copy of the view has."""
    for head_dim in (64, 128):
        dtype = row_dtypes(device)[-1]
        shape = Shape([3, 2, 9], [5, 5, 5], head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype)
        step = make_step(shape, 5, device)
        parts = [torch.randn(*own, 200, head_dim).to(device, dtype) for _ in range(2)]
        shared = [part.expand(3, 2, 200, head_dim) for part in parts]
        lens = torch.tensor([200, 131, 64], dtype=torch.int32, device=device)
        step.options["view"] = CompactView(*(tensor.contiguous() for tensor in shared), lens)
        expected = step.run()
        step.options["view"] = CompactView(*shared, lens)
        for got, wanted in zip(step.run(), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_keys_that_a_scale_makes_nothing(device: str, softcap: float) -> None:
    """A float8 scale of 0: all tokens of the prefix weigh alike, also where some are masked."""
    shape = Shape(
        rows=[3, 2],
        prefix=[90, 17],
        dtype=row_dtypes(device)[-1],
        cache_dtype=FP8,
        scales="head",
        softcap=softcap,
    )
    step = make_step(shape, 6, device)
    step.options["k_scale"][0] = 0.0
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_softcap_is_still_exact(device: str) -> None:
    step = make_step(Shape([3], [300], dtype=row_dtypes(device)[0], softcap=1000.0), 16, device)
    assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
def test_chain_mask_equals_no_mask(device: str) -> None:
    shape = Shape([7, 70], [33, 700], dtype=row_dtypes(device)[0])
    plain = make_step(shape, 5, device)
    shape.mask, shape.poison = "chain", True
    masked = make_step(shape, 5, device)
    for name, tensor in plain.arguments.items():
        masked.arguments[name] = tensor
    for got, expected in zip(masked.run(), plain.run(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["partial", "compact"])
def test_view_of_everything_equals_the_whole_prefix(device: str, kind: str) -> None:
    shape = Shape([3, 5, 1], [640, 33, 1100], heads=6, kv_heads=2, dtype=row_dtypes(device)[0])
    shape.mask, shape.page_size, shape.poison = "tree", 32, False
    step = make_step(shape, 8, device)
    table, size = step.arguments["block_table"].cpu(), shape.page_size
    if kind == "partial":
        blocks = (table[:, None, :, None] * 2 + torch.arange(2, dtype=torch.int32)).flatten(2)
        blocks = blocks.expand(-1, shape.kv_heads, -1).contiguous()
        lens = step.arguments["prefix_lens"].cpu()
        view = PartialView(
            blocks.to(device), ((lens + 15) // 16).int().to(device), lens.to(device), 16
        )
    else:
        keys, values = (
            step.arguments[name].cpu()[table.long()].flatten(1, 2).transpose(1, 2).to(device)
            for name in ("key_cache", "value_cache")
        )
        assert keys.shape[2] == table.shape[1] * size
        view = CompactView(keys, values, step.arguments["prefix_lens"])
    for got, expected in zip(step.run(view=view), step.run(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_depends_on_its_own_request_only(device: str) -> None:
    shape = Shape(
        rows=[1, 8, 0, 33, 4],
        prefix=[2100, 77, 9, 600, 0],
        heads=8,
        kv_heads=2,
        dtype=row_dtypes(device)[-1],
        mask="tree",
        view="mixed_partial",
    )
    step = make_step(shape, 21, device)
    out, lse = step.run()
    starts = step.arguments["query_start"].tolist()
    for request in range(len(shape.rows)):
        rows = slice(starts[request], starts[request + 1])
        alone, alone_lse = step.only(request).run()
        assert torch.equal(alone, out[rows]), f"request {request}"
        assert torch.equal(alone_lse, lse[rows])


@pytest.mark.parametrize("device", DEVICES)
def test_repeats_bit_for_bit(device: str) -> None:
    shape = Shape([5, 9], [1500, 300], dtype=row_dtypes(device)[-1], mask="tree")
    step = make_step(shape, 2, device)
    first = step.run()
    for _ in range(3):
        for again, expected in zip(step.run(), first, strict=True):
            assert torch.equal(again, expected)


def test_the_number_of_threads_changes_nothing() -> None:
    shape = Shape([3, 40], [5000, 130], heads=8, kv_heads=4, mask="tree")
    step = make_step(shape, 6)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(step.run())
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
@pytest.mark.parametrize("token", [0, 100, 599])
def test_nan_in_a_used_slot_reaches_the_rows_that_see_it(
    device: str, cache: str, token: int
) -> None:
    step = make_step(Shape([2, 3], [600, 600], dtype=row_dtypes(device)[0]), 4, device)
    slot = step.seen[0][1][token]
    step.arguments[cache][slot // 16, slot % 16, 1, 5] = float("nan")
    out, _ = step.run()
    sees = torch.zeros(5, 4, dtype=torch.bool)
    sees[:2, 2:] = True  # request 0, the query heads of KV head 1
    assert torch.equal(torch.isnan(out).any(-1).cpu(), sees)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize(("rows", "prefix", "head_dim"), [(6, 20, 64), (70, 700, 128)])
def test_a_hidden_row_may_hold_anything(
    device: str, bad: float, cache_dtype: torch.dtype | None, rows: int, prefix: int, head_dim: int
) -> None:
    shape = Shape([rows], [prefix], mask="tree", dtype=row_dtypes(device)[0], head_dim=head_dim)
    step = make_step(replace(shape, cache_dtype=cache_dtype), 9, device)
    clean = step.run()[0]
    hidden = rows * 2 // 3
    sees = torch.tensor([hidden in step.visible[0][row] for row in range(rows)])
    assert sees.any()
    assert not sees.all()

    step.arguments["value"][hidden, :, 5] = bad
    out = step.run()[0]
    assert torch.equal(out[~sees], clean[~sees])
    assert not torch.isfinite(out[sees][..., 5]).any()
    others = [channel for channel in range(head_dim) if channel != 5]
    assert torch.equal(out[sees][..., others], clean[sees][..., others])

    step.arguments["value"][hidden] = bad
    step.arguments["key"][hidden] = bad
    out = step.run()[0]
    assert torch.equal(out[~sees], clean[~sees])
    assert not torch.isfinite(out[sees]).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["causal", "tree"])
@pytest.mark.parametrize(
    ("rows", "head_dim", "cache_dtype"),
    [(6, 64, None), (6, 128, FP8), (20, 128, None), (20, 64, FP8), (60, 256, None), (40, 80, FP8)],
)
def test_a_token_outside_some_windows_may_hold_anything(
    device: str, mask: str, rows: int, head_dim: int, cache_dtype: torch.dtype | None
) -> None:
    """It reaches the rows that see it; over float8 pages on CUDA others of the request as well.

    Windows begin in several steps of the kernels. What no row sees holds NaN throughout.
    """
    whole_request = device == "cuda" and cache_dtype is FP8
    for prefix, window in ((100, 70), (700, 300), (700, 41)):
        shape = Shape([rows, 1], [prefix, 20], 8, 2, head_dim, mask=mask, window=window)
        shape = replace(shape, dtype=row_dtypes(device)[-1], cache_dtype=cache_dtype)
        step = make_step(shape, rows, device)
        clean, clean_lse = step.run()
        assert_close(step, clean, clean_lse)
        depths = [
            row if mask == "causal" else len(sees) - 1 for row, sees in enumerate(step.visible[0])
        ]
        some = sorted(depths)[len(depths) // 2]  # half of the rows are beyond
        for slots in step.seen[0]:
            slot = slots[prefix + some - window]
            value = step.arguments["value_cache"][slot // 16, slot % 16]
            value.view(torch.uint8).fill_(0x7F if cache_dtype is FP8 else 0xFF)
        sees = torch.tensor([depth < some for depth in depths] + [False], device=device)
        assert sees.any()
        assert not sees[:-1].all()
        out, lse = step.run()
        assert out[sees].isnan().all()
        apart = ~sees
        if whole_request:
            apart[:-1] = False
        assert torch.equal(out[apart], clean[apart])
        assert torch.equal(lse, clean_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows_and_output(device: str) -> None:
    dtype = row_dtypes(device)[0]
    step = make_step(Shape([3, 4], [100, 20], dtype=dtype, mask="tree"), 12, device)
    packed = torch.cat([step.arguments[n] for n in ("query", "key", "value")], dim=1)
    heads, kv_heads = step.shape.heads, step.shape.kv_heads
    step.arguments["query"] = packed[:, :heads]
    step.arguments["key"] = packed[:, heads : heads + kv_heads]
    step.arguments["value"] = packed[:, heads + kv_heads :]
    room = torch.full((7, heads + 2, 64), 7.0, dtype=dtype, device=device)
    out, lse = step.run(out=room[:, 1:-1])
    assert out.data_ptr() == room[:, 1:-1].data_ptr()
    assert_close(step, out, lse)
    assert (room[:, 0] == 7).all()
    assert (room[:, -1] == 7).all()
    # Channels apart, and an address that is no multiple of anything.
    wide = torch.zeros(7, heads, 128, dtype=dtype, device=device)
    wide[..., ::2] = step.arguments["query"]
    step.arguments["query"] = wide[..., ::2]
    shifted = torch.zeros(step.arguments["key"].numel() + 1, dtype=dtype, device=device)
    shifted = shifted[1:].view(7, kv_heads, 64)
    step.arguments["key"] = shifted.copy_(step.arguments["key"])
    assert_close(step, *step.run())


def test_head_sizes_beyond_the_list_on_the_cpu() -> None:
    for head_dim in (8, 24, 72, 136, 512):
        step = make_step(Shape([2], [70], head_dim=head_dim), head_dim)
        assert_close(step, *step.run())


def test_any_page_size_on_the_cpu() -> None:
    for page_size in (1, 5, 24):
        step = make_step(Shape([2], [70], page_size=page_size), page_size)
        assert_close(step, *step.run())


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefix_of_a_million_tokens(device: str) -> None:
    """A few pages stand many times in the table: a token seen n times weighs n times as much."""
    pages, size, entries, dim = 5, 128, 8192, 64
    rng = np.random.default_rng(31)
    dtype = row_dtypes(device)[0]

    def noise(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype)

    cache, query, rows = noise(2, pages, size, 1, dim), noise(2, 3, dim), noise(2, 2, 1, dim)
    table = torch.from_numpy(rng.integers(0, pages, (1, entries)).astype(np.int32))
    length = entries * size - 5
    counts = np.bincount(table[0].numpy(), minlength=pages)[:, None].repeat(size, 1)
    counts[table[0, -1].item(), -5:] -= 1
    out = verify_attention(
        *(t.to(device) for t in (query, *rows, *cache, table)),
        torch.tensor([length], dtype=torch.int32, device=device),
        torch.tensor([0, 2], dtype=torch.int32, device=device),
        None,
        0.3,
    )
    keys, values = (cache[i, :, :, 0].double().numpy().reshape(-1, dim) for i in range(2))
    own_keys, own_values = (rows[i, :, 0].double().numpy() for i in range(2))
    for row in range(2):
        for head in range(3):
            q = query[row, head].double().numpy()
            weights = np.exp(keys @ q * 0.3) * counts.reshape(-1)
            own = np.exp(own_keys[: row + 1] @ q * 0.3)
            total = weights @ values + own @ own_values[: row + 1]
            expected = total / (weights.sum() + own.sum())
            error = np.abs(out[row, head].cpu().double().numpy() - expected).max()
            assert error < {torch.float32: 2e-5}.get(dtype, 2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_beyond_the_reach_of_32_bits(device: str) -> None:
    dtype = row_dtypes(device)[-1]
    step = make_step(Shape([2], [40], kv_heads=1, heads=2, dtype=dtype), 17, device)
    expected, expected_lse = step.run()
    page = 16 * 64
    used = step.arguments["block_table"][0, :3].long()
    last = 2**32 // page  # 2^32 elements before it, never touched
    for name in ("key_cache", "value_cache"):
        far = torch.empty(last + 3, 16, 1, 64, dtype=dtype, device=device)
        far[last:] = step.arguments[name][used]
        step.arguments[name] = far
    step.arguments["block_table"] = torch.tensor(
        [[last, last + 1, last + 2]], dtype=torch.int32, device=device
    )
    out, lse = step.run()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_prefix_and_rows_apart_merge_to_the_whole(device: str) -> None:
    shape = Shape([4, 6], [300, 40], dtype=row_dtypes(device)[0], mask="tree")
    step = make_step(shape, 14, device)
    rows_only = make_step(shape, 14, device)
    rows_only.arguments["prefix_lens"] = torch.zeros_like(rows_only.arguments["prefix_lens"])
    prefix_only = make_step(shape, 14, device)
    prefix_only.tree_mask.zero_()
    parts = [rows_only.run(), prefix_only.run()]
    out, lse = merge_states([p[0] for p in parts], [p[1] for p in parts])
    assert_close(step, out, lse)


@pytest.mark.parametrize("device", DEVICES)
def test_large_logits_do_not_overflow(device: str) -> None:
    step = make_step(Shape([3], [200], dtype=row_dtypes(device)[0], scale=20.0), 15, device)
    out, lse = step.run()
    assert_close(step, out, lse)
    assert lse.abs().max() > 100


def test_a_negative_scale_on_the_cpu() -> None:
    step = make_step(Shape([3], [200], scale=-0.2), 15)
    assert_close(step, *step.run())


def test_reference_is_not_the_code() -> None:
    """The reference agrees with torch's own attention where that can be asked."""
    step = make_step(Shape([1], [64], heads=2, kv_heads=2, poison=False), 16)
    table = step.arguments["block_table"][0, :4].long()
    keys, values = (
        torch.cat([step.arguments[c][table].flatten(0, 1), step.arguments[r]]).transpose(0, 1)
        for c, r in (("key_cache", "key"), ("value_cache", "value"))
    )
    query = step.arguments["query"].transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    assert np.abs(step.reference()[0] - expected.transpose(0, 1).numpy()).max() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("head_dim", "window", "softcap"), [(64, 600, 0), (96, 0, 20), (128, 0, 0)]
)
def test_the_hint_of_rows_changes_no_bit(
    device: str, head_dim: int, window: int, softcap: float
) -> None:
    """It chooses between row tiles; a small request may share a large one's, and the reverse."""
    shape = Shape(
        rows=[40, 3, 70],
        prefix=[1100, 700, 40],
        heads=8,
        kv_heads=2,
        head_dim=head_dim,
        dtype=row_dtypes(device)[-1],
        mask="tree",
        window=window,
        softcap=softcap,
    )
    step = make_step(shape, 23, device)
    out, lse = step.run(max_rows=1)
    assert_close(step, out, lse)
    wide, wide_lse = step.run(max_rows=70)
    assert torch.equal(wide, out)
    assert torch.equal(wide_lse, lse)
