"""The CUDA kernels of write_kv and commit against a slow model: loops over rows on the host.

Caches are compared as raw bytes, all of them, so a write outside its destination is a difference.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest
import torch

import nwor_specpv
from nwor_specpv import COMMIT_ERRORS, NworError, cache_views

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
SEED = int(os.environ.get("NWOR_TEST_SEED", random.SystemRandom().randrange(2**31)))
FP8 = torch.float8_e4m3fn
LAYOUTS = ("kv_first", "kv_second", "packed", "head_major")
# (heads, channels): whole vectors, one head, odd sizes, more than one slice per row
SHAPES = ((8, 128), (3, 64), (1, 80), (5, 96), (2, 192), (3, 7), (40, 256))


def random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator):
    """Any bit pattern, NaN included: rows are copied, not computed with."""
    size = torch.empty((), dtype=dtype).element_size()
    return random_bytes((*shape[:-1], shape[-1] * size), generator).view(dtype)


def finite_rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator):
    """Magnitudes from far below float8's smallest to far above its largest, and special ones."""
    rows = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-14, 12, shape, generator=generator).float()
    )
    special = torch.tensor([0.0, -0.0, 448.0, 464.0, -1e30, float("inf"), float("nan"), 2.0**-10])
    flat = rows.view(-1)
    places = torch.randperm(flat.numel(), generator=generator)[: special.numel()]
    flat[places] = special
    return rows.to(dtype)


@dataclass
class Caches:
    """The caches of some layers: engine tensors on the host, full of garbage, and their copies on
    the device, with views of both."""

    layers: int
    pages: int
    page_size: int
    heads: int
    dim: int
    dtype: torch.dtype
    layout: str
    generator: torch.Generator
    offset: int = 0  # elements between the allocation's start and the first cache
    host: list[torch.Tensor] = field(default_factory=list)
    device: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.shape = {
            "kv_first": (2, self.pages, self.page_size, self.heads, self.dim),
            "kv_second": (self.pages, 2, self.page_size, self.heads, self.dim),
            "packed": (self.pages, self.heads, self.page_size, 2 * self.dim),
            "head_major": (2, self.pages, self.heads, self.page_size, self.dim),
        }[self.layout]
        self.numel = 2 * self.pages * self.page_size * self.heads * self.dim
        size = torch.empty((), dtype=self.dtype).element_size()
        for _ in range(self.layers):
            # Room before and after, to see writes that miss.
            memory = random_bytes(((self.offset + self.numel + 32) * size,), self.generator)
            self.host.append(memory)
            self.device.append(memory.to(DEVICE))

    @property
    def num_slots(self) -> int:
        return self.pages * self.page_size

    def _views(self, memory: torch.Tensor):
        flat = memory.view(self.dtype)[self.offset : self.offset + self.numel]
        return cache_views(flat.view(self.shape), self.layout)

    def host_views(self):
        return [self._views(memory) for memory in self.host]

    def key_views(self):
        return [self._views(memory)[0] for memory in self.device]

    def value_views(self):
        return [self._views(memory)[1] for memory in self.device]

    def put(self, layer: int, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
        page, token = divmod(slot, self.page_size)
        views = self._views(self.host[layer])
        for view, row in zip(views, (key, value), strict=True):
            view.view(torch.uint8)[page, token] = row.contiguous().view(torch.uint8)

    def check(self, what: str = "") -> None:
        for layer, (host, device) in enumerate(zip(self.host, self.device, strict=True)):
            if not torch.equal(host, device.cpu()):
                wrong = (host != device.cpu()).nonzero().flatten()
                pytest.fail(
                    f"{what}: layer {layer}: {wrong.numel()} bytes differ, first at "
                    f"{wrong[0].item()} of {host.numel()}"
                )


def make_status() -> torch.Tensor:
    return torch.full((8,), -77, dtype=torch.int64, device=DEVICE)


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Batch:
    path: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor
    parents: torch.Tensor | None = None

    def to(self, device: str) -> Batch:
        parents = None if self.parents is None else self.parents.to(device)
        return Batch(self.path.to(device), self.counts.to(device), self.slots.to(device), parents)

    def copy(self) -> Batch:
        parents = None if self.parents is None else self.parents.clone()
        return Batch(self.path.clone(), self.counts.clone(), self.slots.clone(), parents)


def make_batch(
    requests: int,
    depth: int,
    num_slots: int,
    generator: torch.Generator,
    tree: bool = False,
    full: bool = False,
) -> Batch:
    """Request b owns staging rows b*R .. b*R+R-1. Chains take its first `depth` rows; trees hang
    each row below a random earlier one and follow one random path down."""
    rows = depth + 3
    counts = torch.randint(0, depth + 1, (requests,), generator=generator, dtype=torch.int32)
    if full:
        counts[:] = depth
    path = torch.full((requests, depth), -1, dtype=torch.int32)
    slots = torch.full((requests, depth), -1, dtype=torch.int64)
    parents = torch.full((requests * rows,), -1, dtype=torch.int32) if tree else None
    free = torch.randperm(num_slots, generator=generator)
    taken = 0
    for b in range(requests):
        base = b * rows
        line = list(range(base, base + rows))
        if tree:
            for row in range(base + 1, base + rows):
                parent = torch.randint(base - 1, row, (1,), generator=generator).item()
                parents[row] = parent if parent >= base else -1
            line, row = [], base + rows - 1
            while row != -1:
                line.insert(0, row)
                row = parents[row].item()
        counts[b] = min(counts[b].item(), len(line))
        for i in range(counts[b].item()):
            path[b, i] = line[i]
            slots[b, i] = free[taken]
            taken += 1
    return Batch(path, counts, slots, parents)


def staged_rows(
    layers: int,
    batch_rows: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    rows=random_rows,
):
    return tuple(rows((layers, batch_rows, heads, dim), dtype, generator) for _ in "kv")


def commit(staged, caches: Caches, batch: Batch, status: torch.Tensor, **scales) -> None:
    on_device = batch.to(DEVICE)
    nwor_specpv.commit(
        staged[0],
        staged[1],
        caches.key_views(),
        caches.value_views(),
        on_device.path,
        on_device.counts,
        on_device.slots,
        status,
        on_device.parents,
        **scales,
    )


def apply(caches: Caches, staged, batch: Batch) -> int:
    """The model: what the commit should do to the host's copies."""
    tokens = 0
    for b, count in enumerate(batch.counts.tolist()):
        for i in range(count):
            row, slot = batch.path[b, i].item(), batch.slots[b, i].item()
            for layer in range(caches.layers):
                caches.put(layer, slot, staged[0][layer, row], staged[1][layer, row])
            tokens += 1
    return tokens


def check_ok(status: torch.Tensor, tokens: int) -> None:
    assert status.tolist() == [0, 0, 0, 0, tokens, 0, 0, 0]


# ---- commit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_commit_writes_accepted_rows_and_nothing_else(layout, shape):
    generator = generator_of(1)
    heads, dim = shape
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        caches = Caches(3, 12, 16, heads, dim, dtype, layout, generator)
        batch = make_batch(6, 5, caches.num_slots, generator, tree=True)
        staged = staged_rows(3, batch.parents.numel(), heads, dim, dtype, generator)
        status = make_status()
        commit([t.to(DEVICE) for t in staged], caches, batch, status)
        tokens = apply(caches, staged, batch)
        check_ok(status, tokens)
        caches.check(f"{dtype}")


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_commit_of_caches_at_any_alignment(offset):
    generator = generator_of(2)
    caches = Caches(2, 5, 24, 4, 64, torch.bfloat16, "kv_first", generator, offset=offset)
    batch = make_batch(3, 4, caches.num_slots, generator)
    staged = staged_rows(2, 3 * 7, 4, 64, torch.bfloat16, generator)
    status = make_status()
    commit([t.to(DEVICE) for t in staged], caches, batch, status)
    check_ok(status, apply(caches, staged, batch))
    caches.check()


def test_commit_of_strided_staging_with_different_key_and_value_strides():
    generator = generator_of(3)
    caches = Caches(4, 9, 8, 2, 128, torch.bfloat16, "kv_second", generator)
    batch = make_batch(4, 3, caches.num_slots, generator, full=True)
    wide = random_rows((4, 24, 3, 2, 128), torch.bfloat16, generator).to(DEVICE)
    by_head = random_rows((4, 2, 24, 128), torch.bfloat16, generator).to(DEVICE)
    staged = (wide[:, :, 1], by_head.transpose(1, 2))
    status = make_status()
    commit(staged, caches, batch, status)
    check_ok(status, apply(caches, [t.cpu() for t in staged], batch))
    caches.check()


def test_commit_of_more_layers_than_the_usual_table_holds():
    generator = generator_of(4)
    caches = Caches(90, 4, 16, 2, 64, torch.float16, "packed", generator)
    batch = make_batch(2, 4, caches.num_slots, generator, full=True)
    staged = staged_rows(90, 14, 2, 64, torch.float16, generator)
    status = make_status()
    commit([t.to(DEVICE) for t in staged], caches, batch, status)
    check_ok(status, apply(caches, staged, batch))
    caches.check()


def test_commit_of_a_thousand_requests():
    generator = generator_of(5)
    caches = Caches(2, 520, 16, 2, 64, torch.bfloat16, "packed", generator)
    staged = staged_rows(2, 1024 * 10, 2, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    for full in (False, True):
        batch = make_batch(1024, 7, caches.num_slots, generator, full=full)
        status = make_status()
        commit(on_device, caches, batch, status)
        check_ok(status, apply(caches, staged, batch))
        caches.check(f"full={full}")


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0), (3, 4)], ids=str)
def test_commit_of_nothing_writes_the_status_only(sizes):
    generator = generator_of(6)
    caches = Caches(2, 4, 16, 2, 64, torch.bfloat16, "kv_first", generator)
    requests, depth = sizes
    batch = Batch(
        torch.full((requests, depth), -1, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32),
        torch.full((requests, depth), -1, dtype=torch.int64),
    )
    staged = staged_rows(2, 8, 2, 64, torch.bfloat16, generator)
    status = make_status()
    commit([t.to(DEVICE) for t in staged], caches, batch, status)
    check_ok(status, 0)
    caches.check()


def test_commit_beyond_four_gigabytes():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    heads, dim, page_size = 8, 128, 16
    pages = 5 * 2**30 // (heads * dim * page_size * 2) + 1  # 5 GiB, 2.7e9 elements
    key, value = (
        torch.zeros(pages, page_size, heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"
    )
    staged = [torch.ones(1, 2, heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    last = pages * page_size - 1
    status = make_status()
    nwor_specpv.commit(
        *staged,
        [key],
        [value],
        torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE),
        torch.tensor([2], dtype=torch.int32, device=DEVICE),
        torch.tensor([[last, last - page_size]], device=DEVICE),
        status,
    )
    check_ok(status, 2)
    for cache in (key, value):
        assert cache.view(-1, heads, dim)[last].eq(1).all()
        assert cache.view(-1, heads, dim)[last - page_size].eq(1).all()
        assert sum(part.count_nonzero().item() for part in cache.split(4096)) == 2 * heads * dim


# ---- violations --------------------------------------------------------------------------------

CHAIN_ROWS = 7  # rows per request of make_batch(depth=4)


def break_count_negative(batch):
    batch.counts[1] = -1
    return "count_range", 1, 0, -1


def break_count_beyond_depth(batch):
    batch.counts[2] = 5
    return "count_range", 2, 0, 5


def break_path_negative(batch):
    batch.path[1, 2] = -1
    return "path_range", 1, 2, -1


def break_path_beyond_staging(batch):
    batch.path[3, 3] = 4 * CHAIN_ROWS
    return "path_range", 3, 3, 4 * CHAIN_ROWS


def break_path_huge(batch):
    batch.path[0, 0] = 2**31 - 1
    return "path_range", 0, 0, 2**31 - 1


def break_order(batch):
    batch.path[2, 1], batch.path[2, 2] = batch.path[2, 2].item(), batch.path[2, 1].item()
    return "not_a_chain", 2, 2, batch.path[2, 2].item()


def break_slot_negative(batch):
    batch.slots[0, 3] = -1
    return "slot_range", 0, 3, -1


def break_slot_far_negative(batch):
    batch.slots[0, 1] = -(2**62)
    return "slot_range", 0, 1, -(2**62)


def break_slot_beyond(batch):
    batch.slots[3, 0] = 8 * 16
    return "slot_range", 3, 0, 8 * 16


def break_slot_far_beyond(batch):
    batch.slots[3, 0] = 2**40
    return "slot_range", 3, 0, 2**40


def break_duplicate_within(batch):
    batch.slots[1, 3] = batch.slots[1, 0]
    return "duplicate_slot", 1, 3, batch.slots[1, 0].item()


def break_duplicate_across(batch):
    batch.slots[3, 1] = batch.slots[0, 2]
    return "duplicate_slot", 3, 1, batch.slots[0, 2].item()


def break_many_the_first_counts(batch):
    batch.slots[3, 3] = batch.slots[3, 2] = batch.slots[2, 1] = batch.slots[0, 3]
    batch.counts[3] = 9
    batch.path[2, 3] = 2**20
    return "duplicate_slot", 2, 1, batch.slots[0, 3].item()


def break_entry_in_two_ways(batch):
    batch.path[1, 1], batch.slots[1, 1] = -5, 2**50
    return "path_range", 1, 1, -5


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("layout", ["kv_first", "packed"])
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_commit_leaves_every_byte_unchanged_when(break_it, layout):
    generator = generator_of(7)
    caches = Caches(3, 8, 16, 3, 64, torch.bfloat16, layout, generator)
    staged = staged_rows(3, 4 * CHAIN_ROWS, 3, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    batch = make_batch(4, 4, caches.num_slots, generator, full=True)
    label, request, index, value = break_it(batch)
    for _ in range(5):  # the report does not depend on which block or thread comes first
        status = make_status()
        commit(on_device, caches, batch, status)
        assert status.tolist() == [COMMIT_ERRORS.index(label), request, index, value, 0, 0, 0, 0]
    caches.check()
    for before, after in zip(staged, on_device, strict=True):
        assert torch.equal(before.view(torch.uint8), after.cpu().view(torch.uint8))


def test_commit_refuses_a_path_that_leaves_its_parents():
    generator = generator_of(8)
    caches = Caches(2, 8, 16, 2, 64, torch.bfloat16, "kv_first", generator)
    batch = make_batch(3, 4, caches.num_slots, generator, full=True)
    batch.parents = torch.full((3 * CHAIN_ROWS,), -1, dtype=torch.int32)
    for b in range(3):
        for i in range(1, CHAIN_ROWS):
            batch.parents[b * CHAIN_ROWS + i] = b * CHAIN_ROWS + i - 1
    staged = staged_rows(2, 3 * CHAIN_ROWS, 2, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    for request, index, row in ((0, 0, 1), (1, 2, CHAIN_ROWS + 4), (2, 3, 2)):
        broken = batch.copy()
        broken.path[request, index] = row
        status = make_status()
        commit(on_device, caches, broken, status)
        code = COMMIT_ERRORS.index("not_a_chain")
        assert status.tolist() == [code, request, index, row, 0, 0, 0, 0]
        caches.check()
    status = make_status()
    commit(on_device, caches, batch, status)
    check_ok(status, apply(caches, staged, batch))
    caches.check()


def test_commit_finds_duplicates_in_a_full_batch():
    generator = generator_of(9)
    caches = Caches(1, 600, 16, 1, 64, torch.bfloat16, "kv_first", generator)
    staged = staged_rows(1, 1024 * 11, 1, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    clean = make_batch(1024, 8, caches.num_slots, generator, full=True)
    for first, later in (((0, 0), (1023, 7)), ((511, 3), (511, 4)), ((1000, 0), (1001, 0))):
        batch = clean.copy()
        batch.slots[later] = batch.slots[first]
        status = make_status()
        commit(on_device, caches, batch, status)
        code = COMMIT_ERRORS.index("duplicate_slot")
        assert status.tolist() == [code, *later, batch.slots[first].item(), 0, 0, 0, 0]
        caches.check()
    batch = clean.copy()
    batch.slots[:] = 5  # everybody wants one slot: the second of all is reported
    status = make_status()
    commit(on_device, caches, batch, status)
    assert status.tolist()[:4] == [COMMIT_ERRORS.index("duplicate_slot"), 0, 1, 5]
    caches.check()


# ---- float8 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float8_bytes_equal_those_of_the_cpu(dtype, dim, per_head):
    generator = generator_of(10)
    heads = 4
    caches = Caches(2, 6, 16, heads, dim, FP8, "packed", generator)
    batch = make_batch(3, 4, caches.num_slots, generator, full=True)
    staged = staged_rows(2, 3 * CHAIN_ROWS, heads, dim, dtype, generator, rows=finite_rows)
    scales = [torch.rand(heads if per_head else 1, generator=generator) + 0.01 for _ in range(4)]
    status = make_status()
    commit(
        [t.to(DEVICE) for t in staged],
        caches,
        batch,
        status,
        k_scales=[scale.to(DEVICE) for scale in scales[:2]],
        v_scales=[scale.to(DEVICE) for scale in scales[2:]],
    )
    check_ok(status, 12)
    views = caches.host_views()
    nwor_specpv.commit(
        *staged,
        [key for key, _ in views],
        [value for _, value in views],
        batch.path,
        batch.counts,
        batch.slots,
        torch.zeros(8, dtype=torch.int64),
        None,
        scales[:2],
        scales[2:],
    )
    caches.check("commit")

    # The direct write of the same rows gives the same bytes.
    direct = Caches(2, 6, 16, heads, dim, FP8, "packed", generator_of(10))
    slots = batch.slots.flatten().to(DEVICE)
    order = batch.path.flatten().long()
    none = torch.full((12,), -1, dtype=torch.int32, device=DEVICE)
    for layer in range(2):
        rows = [t[layer, order].to(DEVICE) for t in staged]
        nwor_specpv.write_kv(
            *rows,
            direct.key_views()[layer],
            direct.value_views()[layer],
            slots,
            none,
            *(torch.empty_like(t[:1]) for t in rows),
            scales[layer].to(DEVICE),
            scales[2 + layer].to(DEVICE),
        )
    direct.host = caches.host
    direct.check("direct write")


# ---- write_kv ----------------------------------------------------------------------------------


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


# ---- graphs, streams, random rounds -------------------------------------------------------------


def test_graph_replays_with_changed_paths_counts_and_slots():
    generator = generator_of(15)
    layers, requests, depth, heads, dim = 4, 5, 4, 2, 64
    rows = requests * CHAIN_ROWS
    caches = Caches(layers, 8, 16, heads, dim, torch.bfloat16, "packed", generator)
    keys, values = caches.key_views(), caches.value_views()
    source = torch.zeros(2, layers, rows, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    staged = torch.zeros_like(source)
    held = make_batch(requests, depth, caches.num_slots, generator).to(DEVICE)
    status = make_status()
    skip = torch.full((rows,), -1, device=DEVICE)
    stage_rows = torch.arange(rows, dtype=torch.int32, device=DEVICE)

    def step():
        for layer in range(layers):
            nwor_specpv.write_kv(
                source[0, layer],
                source[1, layer],
                keys[layer],
                values[layer],
                skip,
                stage_rows,
                staged[0, layer],
                staged[1, layer],
                exclusive=True,
            )
        nwor_specpv.commit(
            staged[0], staged[1], keys, values, held.path, held.counts, held.slots, status
        )

    held.counts.zero_()  # the warm-up must not change the caches
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(12):
        fresh = random_rows(tuple(source.shape), torch.bfloat16, generator)
        source.copy_(fresh)
        batch = make_batch(requests, depth, caches.num_slots, generator, full=turn % 2 == 0)
        broken = turn % 4 == 2
        if broken:
            batch.slots[4, 3] = batch.slots[0, 0]
        held.path.copy_(batch.path)
        held.counts.copy_(batch.counts)
        held.slots.copy_(batch.slots)
        graph.replay()
        if broken:
            code = COMMIT_ERRORS.index("duplicate_slot")
            assert status.tolist()[:3] == [code, 4, 3]
        else:
            check_ok(status, apply(caches, fresh, batch))
        caches.check(f"turn {turn}")


def test_commits_on_two_streams_do_not_disturb_each_other():
    generator = generator_of(16)
    runs = []
    for _ in range(2):
        caches = Caches(3, 64, 16, 4, 128, torch.bfloat16, "kv_first", generator)
        staged = staged_rows(3, 40 * CHAIN_ROWS, 4, 128, torch.bfloat16, generator)
        batch = make_batch(40, 4, caches.num_slots, generator)
        runs.append((torch.cuda.Stream(), caches, staged, [t.to(DEVICE) for t in staged], batch))
    torch.cuda.synchronize()
    states = [make_status() for _ in runs]
    torch.cuda.synchronize()
    for _ in range(20):
        for (stream, caches, _, on_device, batch), status in zip(runs, states, strict=True):
            with torch.cuda.stream(stream):
                commit(on_device, caches, batch, status)
    torch.cuda.synchronize()
    for (_, caches, staged, _, batch), status in zip(runs, states, strict=True):
        check_ok(status, apply(caches, staged, batch))
        caches.check()


def test_random_rounds_equal_the_model():
    print(f"seed={SEED}")
    chooser = random.Random(SEED)
    generator = generator_of(SEED)
    for turn in range(150):
        heads, dim = chooser.choice(SHAPES[:6])
        dtype = chooser.choice([torch.bfloat16, torch.float16, torch.float32])
        page_size = chooser.choice([1, 8, 16, 24, 32])
        layers, requests, depth = (chooser.randint(1, most) for most in (6, 12, 9))
        pages = requests * depth // page_size + chooser.randint(1, 9)
        layout = chooser.choice(LAYOUTS)
        caches = Caches(layers, pages, page_size, heads, dim, dtype, layout, generator)
        tree = chooser.random() < 0.5
        batch = make_batch(requests, depth, caches.num_slots, generator, tree=tree)
        staged = staged_rows(layers, requests * (depth + 3), heads, dim, dtype, generator)
        label = "ok"
        accepted = [(b, i) for b in range(requests) for i in range(batch.counts[b].item())]
        if accepted and chooser.random() < 0.4:
            b, i = chooser.choice(accepted)
            label = chooser.choice(["count_range", "path_range", "slot_range", "duplicate_slot"])
            if label == "count_range":
                batch.counts[b] = chooser.choice([-1, depth + 1, 2**31 - 1])
            elif label == "path_range":
                batch.path[b, i] = chooser.choice([-1, requests * (depth + 3), -(2**31)])
            elif label == "slot_range":
                batch.slots[b, i] = chooser.choice([-1, caches.num_slots, 2**45, -(2**45)])
            elif (b, i) != accepted[0]:
                batch.slots[b, i] = batch.slots[accepted[0]]
            else:
                label = "ok"
        status = make_status()
        commit([t.to(DEVICE) for t in staged], caches, batch, status)
        what = f"seed={SEED} turn={turn} {layout} {dtype} {label}"
        if label == "ok":
            assert status.tolist() == [0, 0, 0, 0, apply(caches, staged, batch), 0, 0, 0], what
        else:
            assert COMMIT_ERRORS[status[0].item()] == label, what
            assert status[1].item() == b, what
            assert status[4].item() == 0, what
        caches.check(what)
