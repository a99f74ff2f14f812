"""Float8 caches on sm_90a: what the kernel for 16-bit caches gives over the widened tokens, bit for
bit.

Heads have 64 or 128 channels, requests up to 64 packed rows: more of them take other splits over a
16-bit cache. Scales are powers of two, so that widened tokens hold them exactly.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from nwor_specpv import CompactView
from tests.python.attention.steps import FP8, LAYOUTS, SEED, Shape, Step, assert_close, make_step
from tests.python.attention.test_cuda_forms import TURNS, Batch, chain, make_batch, with_view

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no CUDA device of compute capability 9.0",
)

RANDOM_STEPS = 80
VIEWS = ("none", "none", "partial", "compact", "mixed_partial", "mixed_compact")


def random_shape(seed: int) -> Shape:
    rng = random.Random(seed)
    group = rng.choice((1, 2, 3, 4, 5, 7, 8))
    kv_heads = rng.choice((1, 2, 3))
    most = 64 // group
    lengths = (0, 1, 16, 63, 64, 65, 128, rng.randint(1, 500), rng.randint(500, 3000))
    page_size = rng.choice((16, 32, 48, 64, 128))
    view = rng.choice(VIEWS)
    requests = range(rng.randint(1, 4))
    return Shape(
        rows=[min(most, rng.choice((0, 1, 2, 4, 5, 8, 12, 16, 17, 40, 64))) for _ in requests],
        prefix=[rng.choice(lengths) for _ in requests],
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=rng.choice((64, 128)),
        page_size=page_size,
        dtype=rng.choice((torch.float16, torch.bfloat16)),
        cache_dtype=FP8,
        layout=rng.choice(LAYOUTS),
        mask=rng.choice(("causal", "tree", "chain", "random")),
        view=view,
        block_size=16 if page_size != 128 else rng.choice((16, 32, 64, 128)),
        scales=rng.choice(("none", "tensor", "head")),
        window=rng.choice((0, 0, 1, 7, 100, 600)) if view == "none" else 0,
        softcap=rng.choice((0.0, 0.0, 5.0, 30.0)),
        scale=rng.choice((None, 0.3)),
    )


def with_powers_of_two(step: Step) -> Step:
    options = dict(step.options)
    for name in ("k_scale", "v_scale"):
        if name in options:
            options[name] = options[name].log2().mul(3).round().exp2()
    return replace(step, options=options)


def widened(step: Step) -> Step:
    """The step with 16-bit rows and caches of float16; a scale is in the tokens."""
    arguments, options = dict(step.arguments), dict(step.options)
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].half()
    for name, scale in (("key_cache", "k_scale"), ("value_cache", "v_scale")):
        tokens = arguments[name].float()
        if scale in options:
            tokens = tokens * options.pop(scale).view(1, 1, -1, 1)
        arguments[name] = tokens.half().contiguous()
    view = options.get("view")
    if isinstance(view, CompactView):
        options["view"] = CompactView(view.keys.half(), view.values.half(), view.lens)
    shape = replace(step.shape, dtype=torch.float16, cache_dtype=None)
    return replace(step, shape=shape, arguments=arguments, options=options)


def assert_same(
    dtype: torch.dtype,
    got: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Rows of bfloat16 round the same sums otherwise."""
    assert torch.equal(got[1], wanted[1])
    if dtype == torch.float16:
        assert torch.equal(got[0], wanted[0])
    else:
        error = (got[0].float() - wanted[0].float()).abs()
        assert (error <= wanted[0].float().abs() * 2**-8 + 1e-6).all(), error.max()


@pytest.mark.parametrize("case", range(RANDOM_STEPS))
def test_random_step_gives_what_widened_tokens_give(case: int) -> None:
    seed = SEED + case
    shape = random_shape(seed)
    print(f"seed={SEED} case={case} {shape}")
    step = make_step(shape, seed, "cuda")
    got = step.run()
    assert_close(step, *got)
    for _ in range(3):
        again = step.run()
        assert torch.equal(again[0], got[0])
        assert torch.equal(again[1], got[1])
    exact = with_powers_of_two(step)
    assert_same(shape.dtype, exact.run(), widened(exact).run())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 16])
def test_every_length_around_a_step(rows: int, head_dim: int) -> None:
    for prefix in [*range(18), *range(60, 70), *range(120, 132), 383, 384, 385, 447, 448, 449]:
        shape = Shape(
            [rows, 1], [prefix, 70], 8, 2, head_dim,
            dtype=torch.float16, cache_dtype=FP8, mask="tree",
        )  # fmt: skip
        step = make_step(shape, prefix, "cuda")
        assert_same(shape.dtype, step.run(), widened(step).run())


def over_float8(batch: Batch) -> tuple[Batch, Batch]:
    """The batch over float8 caches, and over the widened ones."""
    narrow = tuple(cache.to(FP8) for cache in batch.caches)
    wide = tuple(cache.to(batch.query.dtype) for cache in narrow)
    return replace(batch, caches=narrow), replace(batch, caches=wide)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 16])
def test_a_full_device(rows: int, head_dim: int) -> None:
    """CTAs take whole requests, groups of splits and single ones in turn."""
    lens = [7000, 1700, 3100, 1030, 410, 64, 2305, 12000, 769, 1537] * 60
    batch = make_batch(
        lens, rows, heads=8, kv_heads=2, head_dim=head_dim, dtype=torch.float16, pages=4096
    )
    float8, wide = over_float8(batch)
    out, lse = float8.run(return_lse=True)
    assert_same(torch.float16, (out, lse), wide.run(return_lse=True))
    for _ in range(TURNS):
        assert torch.equal(float8.run(), out)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("lens", "rows"),
    [
        ([700], 1),
        ([4608], 8),
        ([4608], 16),
        ([32768] * 8, 8),
        ([32768] * 8, 16),
        ([131072], 16),
        ([5000, 90, 2000], 5),
        ([3000] * 40, 16),
    ],
)
def test_usual_batches(lens: list[int], rows: int, head_dim: int, view: bool) -> None:
    batch = make_batch(lens, rows, head_dim=head_dim, dtype=torch.float16, pages=4096)
    float8, wide = over_float8(with_view(batch) if view else batch)
    out, lse = float8.run(return_lse=True)
    assert_same(torch.float16, (out, lse), wide.run(return_lse=True))
    plan = float8.plan()
    for _ in range(TURNS):
        assert torch.equal(float8.run(plan=plan), out)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("lens", "rows"), [([700], 1), ([4608], 8), ([4608], 16), ([5000, 90, 2000], 5)]
)
def test_a_prefix_read_early_changes_nothing(lens: list[int], rows: int, head_dim: int) -> None:
    weight = (torch.randn(head_dim, head_dim, device="cuda") * 8 * head_dim**-0.5).bfloat16()
    batch, _ = over_float8(make_batch(lens, rows, head_dim=head_dim))
    key = batch.key.clone()
    expected = chain(batch, weight, prefix_ready=False)
    assert not expected.isnan().any()
    batch.key.copy_(key)
    assert torch.equal(chain(batch, weight, prefix_ready=True), expected)


@pytest.mark.parametrize("scale", [0.0, 1e-38, 2.0**-90, 2.0**60])
@pytest.mark.parametrize("prefix", [0, 40, 700])
def test_extreme_scales_of_values(prefix: int, scale: float) -> None:
    shape = Shape(
        [3, 1], [prefix, 90], 8, 2, 128, dtype=torch.bfloat16, cache_dtype=FP8, scales="head"
    )
    step = make_step(shape, 5, "cuda")
    step.options["v_scale"].fill_(scale)
    units = [max(1.0, scale) if prefix else 1.0] * 3 + [
        max(1.0, scale)
    ]  # of pages, if there are any
    assert_close(step, *step.run(), unit=np.array(units)[:, None, None])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_value_at_the_edge_of_windows_reaches_the_rows_that_see_it(head_dim: int) -> None:
    rows, prefix, window = 12, 700, 300
    shape = Shape(
        [rows], [prefix], 8, 2, head_dim, dtype=torch.bfloat16, cache_dtype=FP8, window=window
    )
    step = make_step(shape, 3, "cuda")
    clean, clean_lse = step.run()
    slot = step.seen[0][0][prefix + rows // 2 - window]
    value = step.arguments["value_cache"][slot // shape.page_size, slot % shape.page_size]
    value.view(torch.uint8).fill_(0x7F)
    out, lse = step.run()
    assert out[: rows // 2].isnan().all()
    assert torch.equal(out[rows // 2 :], clean[rows // 2 :])
    assert torch.equal(lse, clean_lse)
