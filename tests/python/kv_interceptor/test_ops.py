"""write_kv and commit as torch ops: schemas, fake kernels, torch.compile, every cache layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nwor_specpv
from nwor_specpv import LAYOUTS, NworError, cache_views

PAGES, TOKENS, HEADS, DIM, LAYERS, ROWS, STAGED = 4, 4, 2, 8, 2, 5, 3
FP8 = torch.float8_e4m3fn
OPS = torch.ops.nwor_specpv

ENGINE_SHAPES = {
    "kv_first": (2, PAGES, TOKENS, HEADS, DIM),
    "kv_second": (PAGES, 2, TOKENS, HEADS, DIM),
    "packed": (PAGES, HEADS, TOKENS, 2 * DIM),
    "head_major": (2, PAGES, HEADS, TOKENS, DIM),
}


def engine_cache(layout: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ENGINE_SHAPES[layout], generator=generator).to(dtype)


def write_arguments(layout: str = "kv_first", cache_dtype: torch.dtype = torch.float32) -> tuple:
    """As the op takes them: rows to the cache, to staging, to both and to neither."""
    torch.manual_seed(1)
    row_dtype = torch.bfloat16 if cache_dtype == FP8 else cache_dtype
    rows = [torch.randn(ROWS, HEADS, DIM).to(row_dtype) for _ in range(2)]
    staged = [torch.zeros(STAGED, HEADS, DIM, dtype=row_dtype) for _ in range(2)]
    scales = [torch.tensor([0.5]), torch.tensor([2.0, 0.25])] if cache_dtype == FP8 else [None] * 2
    return (
        *rows,
        *cache_views(engine_cache(layout, cache_dtype), layout),
        torch.tensor([3, -1, 12, -1, 0]),
        torch.tensor([-1, 2, 0, -1, 1], dtype=torch.int32),
        *staged,
        *scales,
        False,
        torch.zeros(8, dtype=torch.int64),
    )


def commit_arguments(layout: str = "kv_first", cache_dtype: torch.dtype = torch.float32) -> tuple:
    torch.manual_seed(2)
    row_dtype = torch.bfloat16 if cache_dtype == FP8 else cache_dtype
    staged = [torch.randn(LAYERS, STAGED, HEADS, DIM).to(row_dtype) for _ in range(2)]
    views = [cache_views(engine_cache(layout, cache_dtype, n), layout) for n in range(LAYERS)]
    scales = [None, None]
    if cache_dtype == FP8:
        scales = [[torch.tensor([0.5])] * LAYERS, [torch.tensor([2.0, 0.25])] * LAYERS]
    return (
        *staged,
        [key for key, _ in views],
        [value for _, value in views],
        torch.tensor([[0, 2], [-1, -1]], dtype=torch.int32),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([[7, 8], [-1, -1]]),
        torch.zeros(8, dtype=torch.int64),
        torch.tensor([-1, 0, 0], dtype=torch.int32),
        *scales,
    )


def clone(argument):
    """A copy that keeps strides: layouts are what these tests are about."""
    if isinstance(argument, torch.Tensor):
        copy = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype)
        return copy.copy_(argument)
    return [clone(entry) for entry in argument] if isinstance(argument, list) else argument


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


OP_CASES = [
    pytest.param(op, make, layout, dtype, id=f"{name}-{layout}-{str(dtype)[6:]}")
    for name, op, make in (
        ("write_kv", OPS.write_kv.default, write_arguments),
        ("commit", OPS.commit.default, commit_arguments),
    )
    for layout in LAYOUTS
    for dtype in (torch.float32, torch.float16, torch.bfloat16, FP8)
]


@pytest.mark.parametrize(("op", "make", "layout", "dtype"), OP_CASES)
def test_opcheck(op, make: Callable[..., tuple], layout: str, dtype: torch.dtype) -> None:
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype != FP8:  # test_schema multiplies its inputs, which torch cannot do with float8
        utils.append("test_schema")
    torch.library.opcheck(op, make(layout, dtype), test_utils=utils)


# ---- the ops do what the text says, in every layout ----


def expected_write(arguments: tuple) -> tuple[torch.Tensor, ...]:
    key, value, key_cache, value_cache, slots, rows, staged_key, staged_value = map(
        clone, arguments[:8]
    )
    k_scale, v_scale = arguments[8:10]
    for row in range(ROWS):
        slot, stage_row = int(slots[row]), int(rows[row])
        for source, cache, staged, scale in (
            (key, key_cache, staged_key, k_scale),
            (value, value_cache, staged_value, v_scale),
        ):
            if slot >= 0:
                stored = source[row].float()
                stored = stored / (scale[:, None] if scale is not None else 1.0)
                cache[slot // TOKENS, slot % TOKENS] = stored.to(cache.dtype)
            if stage_row >= 0:
                staged[stage_row] = source[row]
    return key_cache, value_cache, staged_key, staged_value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
def test_write_kv_writes_rows_to_slots_and_staging(layout: str, dtype: torch.dtype) -> None:
    arguments = write_arguments(layout, dtype)
    expected = expected_write(arguments)
    OPS.write_kv(*arguments)
    for name, got, want in zip(
        ("key_cache", "value_cache", "staged_key", "staged_value"),
        (*arguments[2:4], *arguments[6:8]),
        expected,
        strict=True,
    ):
        assert torch.equal(raw(got), raw(want)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_write_rows_writes_to_slots_alone(dtype: torch.dtype) -> None:
    arguments = write_arguments(cache_dtype=dtype)
    caches = expected_write(arguments)[:2]
    nwor_specpv.write_rows(*arguments[:5], *arguments[8:10])
    for got, want in zip(arguments[2:4], caches, strict=True):
        assert torch.equal(raw(got), raw(want))
    direct = (*write_arguments(cache_dtype=dtype)[:5], None, None, None, *arguments[8:])
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OPS.write_kv.default, direct, test_utils=utils)


@pytest.mark.parametrize("left_out", [5, 6, 7])
def test_staging_is_given_whole_or_not_at_all(left_out: int) -> None:
    arguments = list(write_arguments())
    arguments[left_out] = None
    before = clone(arguments[2])
    with pytest.raises(NworError, match="stage_rows, staged_key, staged_value: got some of them"):
        nwor_specpv.write_kv(*arguments[:10])
    assert torch.equal(arguments[2], before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
def test_commit_moves_the_path_to_its_slots(layout: str, dtype: torch.dtype) -> None:
    arguments = commit_arguments(layout, dtype)
    expected = [clone(arguments[2]), clone(arguments[3])]
    scales = (
        [None] * LAYERS if arguments[9] is None else arguments[9],
        arguments[10] or [None] * LAYERS,
    )
    for side in range(2):
        for layer in range(LAYERS):
            scale = scales[side][layer]
            for row, slot in ((0, 7), (2, 8)):
                stored = arguments[side][layer, row].float()
                stored = stored / (scale[:, None] if scale is not None else 1.0)
                cache = expected[side][layer]
                cache[slot // TOKENS, slot % TOKENS] = stored.to(dtype)
    OPS.commit(*arguments)
    assert arguments[7].tolist() == [0, 0, 0, 0, 2, 0, 0, 0]
    for side in range(2):
        for layer in range(LAYERS):
            assert torch.equal(raw(arguments[2 + side][layer]), raw(expected[side][layer]))


def test_exclusive_keeps_staged_rows_out_of_the_cache() -> None:
    arguments = list(write_arguments())
    arguments[10] = True
    before = arguments[2].clone()
    OPS.write_kv(*arguments)
    changed = (arguments[2] != before).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    assert changed == [3]  # rows 2 and 4 are staged, so their slots 12 and 0 are left alone


# ---- tensors without data ----


def test_meta_tensors_are_answered_without_data() -> None:
    def to_meta(argument):
        if isinstance(argument, torch.Tensor):
            return argument.to("meta")
        return [to_meta(entry) for entry in argument] if isinstance(argument, list) else argument

    for op, make in ((OPS.write_kv, write_arguments), (OPS.commit, commit_arguments)):
        for layout in LAYOUTS:
            assert op(*map(to_meta, make(layout))) is None


@pytest.mark.parametrize("allow_non_fake_inputs", [False, True])
def test_fake_tensors_are_answered_without_data(allow_non_fake_inputs: bool) -> None:
    for op, make in ((OPS.write_kv, write_arguments), (OPS.commit, commit_arguments)):
        arguments = make()
        before = [raw(t).clone() for t in arguments if isinstance(t, torch.Tensor)]
        mode = FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)

        def fake(argument, mode=mode):
            if isinstance(argument, torch.Tensor):
                return mode.from_tensor(argument)
            return [fake(a, mode) for a in argument] if isinstance(argument, list) else argument

        with mode:
            assert op(*map(fake, arguments)) is None
        after = [raw(t) for t in arguments if isinstance(t, torch.Tensor)]
        assert all(map(torch.equal, before, after))


def test_fake_tensors_with_wrong_shapes_are_refused() -> None:
    with FakeTensorMode() as mode:
        arguments = [
            mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in write_arguments()
        ]
        arguments[0] = arguments[0][:, :1]
        with pytest.raises(ValueError, match=r"key: got sizes .* expected"):
            OPS.write_kv(*arguments)


# ---- torch.compile ----


def step(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    stage_rows,
    staged_key,
    staged_value,
    path,
    counts,
    to,
    status,
):
    """One layer's round inside a compiled graph: write, then commit what was accepted."""
    nwor_specpv.write_kv(
        key * 2,
        value + 1,
        key_cache,
        value_cache,
        slots,
        stage_rows,
        staged_key[0],
        staged_value[0],
        exclusive=True,
    )
    nwor_specpv.commit(
        staged_key, staged_value, [key_cache], [value_cache], path, counts, to, status
    )
    return status + 0


def step_arguments() -> tuple:
    rows = write_arguments("packed")
    staged = [t[None].clone() for t in rows[6:8]]
    return (
        *rows[:6],
        *staged,
        torch.tensor([[0, 2]], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([[14, 15]]),
        torch.zeros(8, dtype=torch.int64),
    )


NO_COMPILER = shutil.which("g++") is None and shutil.which("clang++") is None
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")),
]


# Torch would start ten Pythons to find out what vectors the compiler has.
@torch._inductor.config.patch("cpp.vec_isa_ok", False)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(backend: str, dynamic: bool) -> None:
    expected, got = step_arguments(), step_arguments()
    step(*expected)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    result = compiled(*got)
    assert result.tolist() == [0, 0, 0, 0, 2, 0, 0, 0]
    for want, have in zip(expected, got, strict=True):
        assert torch.equal(raw(want), raw(have))


def test_wrong_values_raise_nwor_error_and_the_torch_op_value_error() -> None:
    arguments = list(write_arguments())
    arguments[4] = arguments[4].int()
    with pytest.raises(NworError, match="slot_mapping: got dtype Int, expected Long"):
        nwor_specpv.write_kv(*arguments[:10])
    with pytest.raises(ValueError, match="slot_mapping: got dtype Int, expected Long"):
        OPS.write_kv(*arguments)


def test_commit_does_not_touch_what_is_not_accepted() -> None:
    arguments = list(commit_arguments())
    arguments[5] = torch.zeros(2, dtype=torch.int32)
    before = [raw(t).clone() for t in (*arguments[2], *arguments[3])]
    OPS.commit(*arguments)
    assert all(map(torch.equal, before, (raw(t) for t in (*arguments[2], *arguments[3]))))
    assert arguments[7].tolist() == [0] * 8
