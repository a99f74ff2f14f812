"""Layers of two cache groups: a token has a slot of its own in each, and all are checked."""

from __future__ import annotations

import pytest
import torch

import nwor_specpv as nwor

PAGE_SIZE, HEADS, DIM, DEPTH = 16, 2, 64, 4
PAGES = (40, 25)  # of each group
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ),
]


class Round:
    """A layer in each group, and a round of chains, of which all will be accepted."""

    def __init__(self, requests: int, device: str) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(5)
        self.caches = [self._random(pages, HEADS, PAGE_SIZE, 2 * DIM) for pages in PAGES]
        self.interceptor = nwor.Interceptor(nwor.NworConfig())
        for group, cache in enumerate(self.caches):
            self.interceptor.bind_layer(str(group), *nwor.cache_views(cache, "packed"), group=group)
        rows = DEPTH + 1
        self.interceptor.begin(nwor.RoundPlan([rows] * requests, [DEPTH] * requests))
        self.path = torch.arange(1, rows, dtype=torch.int32).repeat(requests, 1)
        self.slots, self.written, self.staged = [], [], []
        for group in range(len(PAGES)):
            # The same slots in other orders: they are other places.
            free = torch.randperm(requests * rows, generator=self.generator)
            self.slots.append(free[requests:].view(requests, DEPTH))
            mapping = torch.full((requests, rows), -1)
            mapping[:, 0] = free[:requests]
            self.written.append([self._random(requests * rows, HEADS, DIM) for _ in range(2)])
            outcome = self.interceptor.write(
                str(group), *self.written[group], mapping.view(-1).to(device)
            )
            assert outcome.action == "stage"
        self.staged = [cache.clone() for cache in self.caches]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16).to(self.device)

    def commit(self, slots: list[torch.Tensor], **more: bool) -> nwor.CommitReceipt:
        counts = torch.full((len(self.path),), DEPTH, dtype=torch.int32)
        return self.interceptor.commit(
            self.path.to(self.device),
            counts.to(self.device),
            slots=[each.to(self.device) for each in slots],
            rows="request",
            **more,
        )

    def expect_refusal(self, slots: list[torch.Tensor], expected: tuple) -> None:
        """(error, request, index, value). The CPU says so at once, a device by its receipt."""
        if self.device == "cpu":
            error, request, index, value = expected
            where = f"slots: got {value} for request {request} at index {index}"
            with pytest.raises(nwor.NworError) as raised:
                self.commit(slots, last=False)
            assert str(raised.value).startswith(where)
            assert str(raised.value).endswith(f"({error})")
        else:
            verdict = self.commit(slots, last=False).verdict
            assert (verdict.error, verdict.request, verdict.index, verdict.value) == expected
        self.check(committed=False)

    def check(self, *, committed: bool) -> None:
        for group, (cache, wanted) in enumerate(zip(self.caches, self.staged, strict=True)):
            if committed:
                views = nwor.cache_views(wanted, "packed")
                for view, rows in zip(views, self.written[group], strict=True):
                    drafts = rows.view(len(self.path), DEPTH + 1, HEADS, DIM)[:, 1:].flatten(0, 1)
                    slots = self.slots[group].flatten().to(self.device)
                    view[slots // PAGE_SIZE, slots % PAGE_SIZE] = drafts
            assert torch.equal(cache.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requests", [1, 3, 12, 16, 20])  # one warp checks up to 64 entries
def test_every_group_is_checked_before_any_is_written(requests: int, device: str) -> None:
    held = Round(requests, device)
    last = requests - 1, DEPTH - 1
    for group, (at, value, error) in [
        (0, ((0, 1), held.slots[0][0, 0].item(), "duplicate_slot")),
        (1, ((0, 1), held.slots[1][0, 0].item(), "duplicate_slot")),
        (1, (last, held.slots[1][0, 0].item(), "duplicate_slot")),
        (1, (last, PAGES[1] * PAGE_SIZE, "slot_range")),
        (1, (last, -1, "slot_range")),
    ]:
        slots = [each.clone() for each in held.slots]
        slots[group][at] = value
        held.expect_refusal(slots, (error, *at, value))

    # The first fault of an entry is that of the first group.
    slots = [each.clone() for each in held.slots]
    slots[0][last], slots[1][last] = -5, held.slots[1][0, 0]
    held.expect_refusal(slots, ("slot_range", *last, -5))

    receipt = held.commit(held.slots)
    assert receipt.ok
    assert receipt.committed_tokens == requests * DEPTH
    held.check(committed=True)
