"""Where plans lie: graphs find theirs, and steps of any shape do not add up."""

from __future__ import annotations

import torch

from nwor_specpv.vllm.backend.plan_buffers import PlanBuffers


def test_steps_outside_of_graphs_share_what_the_largest_needs() -> None:
    buffers = PlanBuffers(torch.device("cpu"))
    places = set()
    for rows in (100, 7, 99, 30, 100):
        found = buffers.find(rows, lambda rows=rows: 256 * rows, capture=False)
        assert found.shape == (256 * rows,)
        assert found.dtype == torch.uint8
        places.add(found.data_ptr())
    assert len(places) == 1
    assert buffers.find("larger", lambda: 256 * 101, capture=False).shape == (256 * 101,)
    after = buffers.find(7, lambda: 256 * 7, capture=False)
    assert after.untyped_storage().nbytes() == 256 * 101


def test_a_captured_shape_keeps_its_own() -> None:
    buffers = PlanBuffers(torch.device("cpu"))
    before = buffers.find("b", lambda: 512, capture=False)
    captured = {
        shape: buffers.find(shape, lambda size=size: size, capture=True)
        for shape, size in (("a", 256), ("b", 512))
    }
    places = {found.untyped_storage().data_ptr() for found in (before, *captured.values())}
    assert len(places) == 3
    for shape, found in captured.items():
        for capture in (False, True):  # a replay; vLLM warms up before it captures
            assert buffers.find(shape, fail, capture=capture).data_ptr() == found.data_ptr()


def fail() -> int:
    raise AssertionError("the size of a captured shape is known")
