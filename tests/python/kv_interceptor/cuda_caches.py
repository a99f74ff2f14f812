"""Caches on host and device, batches of accepted paths, and a slow model of the commit.

The model is loops over rows on the host; caches are compared as raw bytes, all of them, so a write
outside its destination is a difference.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest
import torch

import nwor_specpv
from nwor_specpv import cache_views

DEVICE = "cuda"
SEED = int(os.environ.get("NWOR_TEST_SEED", random.SystemRandom().randrange(2**31)))
FP8 = torch.float8_e4m3fn
LAYOUTS = ("kv_first", "kv_second", "packed", "head_major")
CHAIN_ROWS = 7  # rows per request of make_batch(depth=4)
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
