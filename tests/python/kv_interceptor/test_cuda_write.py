"""The write kernel on CUDA: rows reach cache and staging, wrong slots are skipped and reported."""

from __future__ import annotations

import pytest
import torch

import nwor_specpv
from nwor_specpv import COMMIT_ERRORS, NworError
from tests.python.kv_interceptor.cuda_caches import (
    DEVICE,
    LAYOUTS,
    SHAPES,
    Batch,
    Caches,
    commit,
    generator_of,
    make_batch,
    make_status,
    random_rows,
    staged_rows,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def write_and_model(caches, key, value, slots, rows, staged, exclusive, status=None, skip=()):
    """Runs write_kv on layer 0 and the model beside it; returns the expected staging."""
    expected = [t.cpu().clone() for t in staged]
    nwor_specpv.write_kv(
        key,
        value,
        caches.key_views()[0],
        caches.value_views()[0],
        torch.tensor(slots, device=DEVICE),
        torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        *staged,
        exclusive=exclusive,
        status=status,
    )
    for t, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        if t in skip:
            continue
        if row >= 0:
            for side, source in enumerate((key, value)):
                expected[side][row] = source[t].cpu()
        if slot >= 0 and not (exclusive and row >= 0):
            caches.put(0, slot, key[t].cpu(), value[t].cpu())
    for want, got in zip(expected, staged, strict=True):
        assert torch.equal(want.view(torch.uint8), got.cpu().view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("exclusive", [False, True])
def test_write_kv_goes_to_cache_and_staging(layout, shape, exclusive):
    generator = generator_of(11)
    heads, dim = shape
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 8, 70):
            caches = Caches(1, 9, 16, heads, dim, dtype, layout, generator)
            # As a fused QKV projection gives them: rows far apart.
            qkv = random_rows((tokens, heads * 4, dim), dtype, generator).to(DEVICE)
            key, value = qkv[:, heads : 2 * heads], qkv[:, 2 * heads : 3 * heads]
            staged = [t.to(DEVICE) for t in staged_rows(1, 80, heads, dim, dtype, generator)]
            slots = torch.randperm(caches.num_slots, generator=generator)[:tokens].tolist()
            rows = torch.randperm(80, generator=generator)[:tokens].tolist()
            slots = [slot if t % 3 else -1 for t, slot in enumerate(slots)]
            rows = [row if t % 2 else -1 for t, row in enumerate(rows)]
            write_and_model(
                caches, key, value, slots, rows, [t[0] for t in staged], exclusive=exclusive
            )
            caches.check(f"{dtype} {tokens}")


def test_write_kv_skips_and_reports_the_first_row_out_of_range():
    generator = generator_of(12)
    cases = [
        (40, "slots", 9 * 16, "slot_range"),
        (3, "slots", -2, "slot_range"),
        (3, "slots", 2**33, "slot_range"),
        (0, "rows", 64, "path_range"),
        (63, "rows", -7, "path_range"),
    ]
    for row, which, bad, label in cases:
        caches = Caches(1, 9, 16, 2, 64, torch.bfloat16, "kv_first", generator)
        key, value = (random_rows((64, 2, 64), torch.bfloat16, generator).to(DEVICE) for _ in "kv")
        staged = [t[0].to(DEVICE) for t in staged_rows(1, 64, 2, 64, torch.bfloat16, generator)]
        slots, rows = list(range(64, 128)), list(range(64))
        skip = {row, *range(50, 60)} if which == "slots" else {row}
        for t in sorted(skip, reverse=True):
            (slots if which == "slots" else rows)[t] = bad
        status = torch.zeros(8, dtype=torch.int64, device=DEVICE)
        write_and_model(caches, key, value, slots, rows, staged, False, status, skip)
        caches.check(label)
        code = COMMIT_ERRORS.index(label)
        assert status.tolist() == [code, min(skip), 0, bad, 0, 0, 0, 0]
        # A later fault of the round does not replace the first.
        other = [10**6] + [-1] * 63
        write_and_model(caches, key, value, other, [-1] * 64, staged, False, status, {0})
        assert status.tolist() == [code, min(skip), 0, bad, 0, 0, 0, 0]
        caches.check("second write")


def test_write_kv_without_a_status_still_skips_rows_out_of_range():
    generator = generator_of(13)
    caches = Caches(1, 2, 16, 2, 64, torch.float16, "packed", generator)
    key, value = (random_rows((3, 2, 64), torch.float16, generator).to(DEVICE) for _ in "kv")
    staged = [t[0].to(DEVICE) for t in staged_rows(1, 4, 2, 64, torch.float16, generator)]
    write_and_model(caches, key, value, [32, 5, -9], [0, 4, 1], staged, False, None, {0, 1, 2})
    caches.check()


def test_wrong_use_raises_before_anything_is_launched():
    generator = generator_of(14)
    caches = Caches(2, 4, 16, 2, 64, torch.bfloat16, "kv_first", generator)
    staged = [t.to(DEVICE) for t in staged_rows(2, 8, 2, 64, torch.bfloat16, generator)]
    big = Batch(
        torch.zeros((1025, 8), dtype=torch.int32),
        torch.zeros(1025, dtype=torch.int32),
        torch.zeros((1025, 8), dtype=torch.int64),
    )
    with pytest.raises(NworError, match="path"):
        commit(staged, caches, big, make_status())
    small = make_batch(2, 2, caches.num_slots, generator)
    with pytest.raises(NworError, match="staged_key"):
        commit([t.float() for t in staged], caches, small, make_status())
    small.counts = small.counts.long()
    with pytest.raises(NworError, match="counts"):
        commit(staged, caches, small, make_status())
    caches.check()
