"""Small tensors in one piece of memory."""

from __future__ import annotations

import pytest
import torch

from nwor_specpv.transformers.packed_tensors import copy_to_device, num_words, split_memory
from tests.python.specpv.contexts import DEVICES, seeded


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_equal(device: str) -> None:
    rng = seeded()
    dtypes = (torch.int32, torch.int64, torch.bool, torch.float32)
    for _ in range(20):
        tensors = {}
        for index in range(rng.randrange(1, 6)):
            size = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
            tensors[str(index)] = torch.randint(0, 2, size).to(rng.choice(dtypes))
        there = copy_to_device(tensors, torch.device(device))
        assert list(there) == list(tensors)
        for name, one in tensors.items():
            assert there[name].device.type == device
            assert there[name].dtype == one.dtype
            assert there[name].is_contiguous()
            assert torch.equal(there[name].cpu(), one)


def test_views_share_no_word() -> None:
    sizes = {"a": (torch.int32, (3,)), "b": (torch.int32, (0, 2)), "c": (torch.int64, (2, 2))}
    memory = torch.zeros(num_words(sizes), dtype=torch.int64)
    found = split_memory(memory, sizes)
    for value, one in enumerate(found.values(), 1):
        one.fill_(value)
    assert [one.flatten().tolist() for one in found.values()] == [[1] * 3, [], [3] * 4]
    assert len(memory) == 6
