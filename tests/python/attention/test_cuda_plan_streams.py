"""Streams that share a plan, and with it the workspace of its layers, on CUDA."""

from __future__ import annotations

import pytest
import torch

from nwor_specpv import verify_plan
from tests.python.attention.steps import Shape, make_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PLANNED = ("query", "key_cache", "block_table", "prefix_lens", "query_start")


@pytest.mark.parametrize("plans_again", [False, True])
def test_streams_that_share_a_plan_wait_for_each_other(plans_again: bool) -> None:
    """Long prefixes are split, so partial results of all layers lie in the plan's memory."""
    step = make_step(Shape([5, 5], [30000, 20000], 8, 2, dtype=torch.bfloat16), 67, "cuda")
    expected, _ = step.run(max_rows=5)
    arguments = [step.arguments[name] for name in PLANNED]
    plan = verify_plan(*arguments, max_rows=5)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 3]):
            if plans_again:
                verify_plan(*arguments, max_rows=5, plan=plan)
            outs.append(step.run(max_rows=5, plan=plan)[0])
    torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, expected)


def test_a_plan_of_another_stream_may_be_captured() -> None:
    """Nobody can be waited for in a capture: it is left to whoever captures."""
    step = make_step(Shape([5, 5], [3000, 2000], 8, 2, dtype=torch.bfloat16), 71, "cuda")
    expected, _ = step.run(max_rows=5)
    plan = verify_plan(*(step.arguments[name] for name in PLANNED), max_rows=5)
    out = torch.zeros_like(expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(max_rows=5, plan=plan, out=out, return_lse=False)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
