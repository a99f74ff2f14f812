"""block_summaries against Python's max and min, in every layout, dtype and order of arrival."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nwor_specpv import NworError, block_summaries
from tests.python.specpv.contexts import DEVICES, FLOAT8, Pages, make_pages, seeded, summaries_of

POISON = 77.0


def ints(values: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def empty(pages: Pages, blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(pages.lengths), blocks, *pages.key.shape[2:])
    kmax = torch.full(shape, POISON, dtype=dtype, device=pages.key.device)
    return kmax, -kmax


def check(
    pages: Pages, starts: list[int], ends: list[int], size: int, kmax: torch.Tensor, kmin
) -> None:
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        upper, lower = summaries_of(pages.tokens(b), start, end, size)
        for got, expected, untouched in ((kmax, upper, POISON), (kmin, lower, -POISON)):
            rows = got[b].float().cpu()
            if expected:
                wanted = torch.from_numpy(np.stack(expected)).to(got.dtype).float()
                assert torch.equal(rows[: len(expected)], wanted)
            assert (rows[len(expected) :] == untouched).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["kv_first", "kv_second", "packed", "head_major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FLOAT8])
def test_equal_to_max_and_min(device: str, layout: str, dtype: torch.dtype) -> None:
    rng = seeded()
    page_size = rng.choice([4, 8, 16, 48])
    size = rng.choice([4, 8, 16])
    lengths = [rng.randrange(0, 90) for _ in range(3)]
    starts = [rng.randrange(0, length + 1) for length in lengths]
    pages = make_pages(
        lengths,
        heads=rng.choice([1, 3]),
        dim=rng.choice([5, 16, 64, 80, 128]),
        page_size=page_size,
        dtype=dtype,
        layout=layout,
        device=device,
        scales=rng.choice([0, 1, 2]) if dtype == FLOAT8 else 0,
    )
    out = torch.float32 if dtype == FLOAT8 else rng.choice([torch.float32, dtype])
    kmax, kmin = empty(pages, 24, out)
    arguments = ints(starts, device), ints(lengths, device)
    block_summaries(pages.key, pages.table, *arguments, kmax, kmin, size, pages.k_scale)
    check(pages, starts, lengths, size, kmax, kmin)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8])
def test_by_pages_they_lie_where_their_pages_lie(device: str, dtype: torch.dtype) -> None:
    """Two requests share the pages of a beginning; what no block covers is left alone."""
    rng = seeded()
    size = rng.choice([4, 8, 16])
    page_size = size * rng.choice([1, 2, 3])
    lengths = [rng.randrange(2 * page_size, 9 * page_size) for _ in range(3)]
    dim, scales = rng.choice([5, 64, 128]), rng.choice([1, 2]) if dtype == FLOAT8 else 0
    pages = make_pages(
        lengths, dim=dim, page_size=page_size, dtype=dtype, device=device, scales=scales
    )
    pages.table[1, :2] = pages.table[0, :2]
    out = torch.float32 if dtype == FLOAT8 else dtype
    shape = (pages.key.shape[0], page_size // size, *pages.key.shape[2:])
    kmax = torch.full(shape, POISON, dtype=out, device=device)
    kmin = -kmax
    starts = [size * rng.randrange(0, 4) for _ in lengths]
    done = [rng.randrange(0, 2) for _ in lengths]
    block_summaries(
        pages.key,
        pages.table,
        ints(starts, device),
        ints(lengths, device),
        kmax,
        kmin,
        size,
        pages.k_scale,
        ints(done, device),
        by_pages=True,
    )
    wanted_max, wanted_min = torch.full_like(kmax, POISON), torch.full_like(kmin, -POISON)
    for b, (start, end) in enumerate(zip(starts, lengths, strict=True)):
        upper, lower = summaries_of(pages.tokens(b), start, end, size)
        for i in range(done[b], len(upper)):
            token = start + i * size
            at = int(pages.table[b, token // page_size]), token % page_size // size
            wanted_max[at] = torch.from_numpy(upper[i]).to(out)
            wanted_min[at] = torch.from_numpy(lower[i]).to(out)
    assert torch.equal(kmax, wanted_max)
    assert torch.equal(kmin, wanted_min)


@pytest.mark.parametrize("device", DEVICES)
def test_step_by_step_equals_at_once_bit_for_bit(device: str) -> None:
    rng = seeded()
    pages = make_pages(
        [150, 97], dim=64, page_size=16, dtype=torch.bfloat16, layout="kv_first", device=device
    )
    starts, ends = [32, 16], [32, 16]
    kmax, kmin = empty(pages, 16, torch.bfloat16)
    while ends != pages.lengths:
        done = [(end - start) // 8 for start, end in zip(starts, ends, strict=True)]
        ends = [
            min(length, end + rng.randrange(0, 20))
            for length, end in zip(pages.lengths, ends, strict=True)
        ]
        block_summaries(
            pages.key,
            pages.table,
            ints(starts, device),
            ints(ends, device),
            kmax,
            kmin,
            8,
            done_blocks=ints(done, device),
        )
        fresh_max, fresh_min = empty(pages, 16, torch.bfloat16)
        block_summaries(
            pages.key,
            pages.table,
            ints(starts, device),
            ints(ends, device),
            fresh_max,
            fresh_min,
            8,
        )
        assert torch.equal(kmax.view(torch.int16), fresh_max.view(torch.int16))
        assert torch.equal(kmin.view(torch.int16), fresh_min.view(torch.int16))
    check(pages, starts, ends, 8, kmax, kmin)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_summaries_and_int64_lengths(device: str) -> None:
    seeded()
    pages = make_pages([70], dim=16, device=device)
    wide = torch.full((1, 4, 4, 2, 32), POISON, device=device)
    kmax, kmin = wide[:, 1, :, :, 16:], -wide[:, 2, :, :, :16]
    lengths = torch.tensor([64], device=device)
    block_summaries(pages.key, pages.table, torch.zeros_like(lengths), lengths, kmax, kmin, 16)
    check(pages, [0], [64], 16, kmax, kmin)
    assert (wide[:, [0, 3]] == POISON).all()
    assert (wide[..., :16] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FLOAT8])
@pytest.mark.parametrize("dim", [5, 64])
def test_a_nan_counts_for_nothing(device: str, dtype: torch.dtype, dim: int) -> None:
    """Wherever its token stands; without any number a maximum is -inf, a minimum inf."""
    for size in (1, 4, 16):
        for place in range(size):
            pages = make_pages([size], heads=1, dim=dim, page_size=16, dtype=dtype, device=device)
            page = int(pages.table[0, 0])
            pages.key[page, place, 0, 0] = math.nan
            pages.key[page, :size, 0, 1] = math.nan
            tokens = pages.key[page, :size, 0].float().cpu()
            missing = tokens.isnan()
            out = torch.float32 if dtype == FLOAT8 else dtype
            kmax, kmin = empty(pages, 1, out)
            ends = ints([size], device)
            block_summaries(pages.key, pages.table, ints([0], device), ends, kmax, kmin, size)
            upper, lower = (t[0, 0, 0].float().cpu() for t in (kmax, kmin))
            assert torch.equal(upper, tokens.masked_fill(missing, -math.inf).amax(0))
            assert torch.equal(lower, tokens.masked_fill(missing, math.inf).amin(0))


def good() -> dict:
    pages = make_pages([40, 30])
    kmax, kmin = empty(pages, 3, torch.float32)
    return {
        "key_cache": pages.key,
        "block_table": pages.table,
        "start_tokens": ints([0, 0], "cpu"),
        "end_tokens": ints([40, 30], "cpu"),
        "kmax": kmax,
        "kmin": kmin,
        "block_size": 16,
    }


WRONG = {
    "block size": ({"block_size": 0}, "block_size: got 0"),
    "rank": ({"kmax": torch.zeros(2, 3, 2)}, "kmax: got"),
    "dtype": ({"kmin": torch.zeros(2, 3, 2, 16, dtype=torch.float16)}, "kmin: got"),
    "heads": (
        {"kmax": torch.zeros(2, 3, 1, 16), "kmin": torch.zeros(2, 3, 1, 16)},
        "kmax: got sizes",
    ),
    "requests": ({"start_tokens": torch.zeros(3, dtype=torch.int32)}, "start_tokens: got sizes"),
    "float lengths": ({"end_tokens": torch.zeros(2)}, "end_tokens: got dtype"),
    "beyond the table": (
        {"end_tokens": torch.tensor([40, 600], dtype=torch.int32)},
        r"end_tokens\[1\]: got 600, expected at most",
    ),
    "beyond the summaries": (
        {"end_tokens": torch.tensor([64, 30], dtype=torch.int32)},
        r"end_tokens\[0\]: got 64, that is 4 blocks",
    ),
    "negative start": (
        {"start_tokens": torch.tensor([0, -1], dtype=torch.int32)},
        r"start_tokens\[1\]: got -1",
    ),
    "page": (
        {"end_tokens": torch.tensor([40, 48], dtype=torch.int32)},
        r"block_table\[1, 2\]: got -7",
    ),
    "beyond int32": (
        {"end_tokens": torch.tensor([40, 2**32 + 30])},
        rf"end_tokens\[1\]: got {2**32 + 30}, expected",
    ),
    "below int32": (
        {"start_tokens": torch.tensor([-(2**32), 0])},
        rf"start_tokens\[0\]: got {-(2**32)}, expected",
    ),
    "done": ({"done_blocks": torch.tensor([0, -1], dtype=torch.int32)}, "done_blocks"),
    "scale": ({"k_scale": torch.ones(1)}, "k_scale: got a scale"),
    "by pages, of requests": ({"by_pages": True}, "kmax: got sizes"),
    "by pages, blocks of a page": (
        {"by_pages": True, "kmax": torch.zeros(8, 2, 2, 16), "kmin": torch.zeros(8, 2, 2, 16)},
        "kmax: got 2 blocks of 16 tokens for each page",
    ),
    "by pages, within a block": (
        {
            "by_pages": True,
            "kmax": torch.zeros(8, 1, 2, 16),
            "kmin": torch.zeros(8, 1, 2, 16),
            "start_tokens": torch.tensor([0, 8], dtype=torch.int32),
        },
        r"start_tokens\[1\]: got 8, expected a multiple of the block size 16",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named_and_writes_nothing(name: str) -> None:
    changes, message = WRONG[name]
    arguments = good() | changes
    with pytest.raises(NworError, match=message):
        block_summaries(**arguments)
    if "kmax" not in changes:
        assert (arguments["kmax"] == POISON).all()


def test_fakes_and_schemas() -> None:
    arguments = good()
    torch.library.opcheck(torch.ops.nwor_specpv.block_summaries.default, tuple(arguments.values()))
    store = torch.full((arguments["key_cache"].shape[0], 1, 2, 16), POISON)
    arguments |= {"kmax": store, "kmin": store.clone()}
    given = (*arguments.values(), None, None, True)
    torch.library.opcheck(torch.ops.nwor_specpv.block_summaries.default, given)
