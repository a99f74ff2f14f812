"""The tree ops as torch sees them: schemas, fake kernels, torch.compile, CUDA graphs."""

from __future__ import annotations

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nwor_specpv import (
    accept_greedy,
    accept_sampling,
    likeliest_tokens,
    make_coins,
    target_probs,
    tree_from_chain,
    tree_from_topk,
)
from tests.python.tree.forest import DEVICES
from tests.python.tree.test_trees import drafted

OPS = torch.ops.nwor_specpv
INT32 = torch.int32
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def calls(device: str) -> dict[str, tuple]:
    """Good arguments of every op, the optional status included."""
    chain = torch.tensor([[0, 1, 2, 3]] * 2, device=device)
    tree = tree_from_chain(chain, torch.tensor([3, 4], dtype=INT32, device=device))
    links = (tree.first_child, tree.next_sibling)
    probs = torch.full((2, 4, 6), 1 / 6, device=device)
    coins = (torch.full((2, 4), 0.1, device=device), torch.full((2,), 0.5, device=device))
    status = torch.zeros(2, dtype=torch.int64, device=device)
    numbers = torch.tensor([5, 6], device=device)
    _, tokens, scores, kept = drafted(2, 3, 3, random.Random(1))
    steps = [[part.to(device) for part in parts] for parts in (tokens, scores, kept)]
    ones = torch.ones(2, device=device)
    return {
        "tree_from_parents": (tree.parents, numbers.int(), torch.tensor([4, 2], device=device)),
        "tree_from_topk": (*steps, numbers, numbers.int(), 7),
        "accept_greedy": (chain, chain, *links, status),
        "accept_sampling": (chain, probs, *links, *coins, 1.0, 1.0, status),
        "accept_chain_sampling": (chain, probs, probs, *coins, numbers - 4, status),
        "make_coins": (numbers, numbers, 4),
        "target_probs": (
            probs, ones, numbers.int(), ones * 0.9, ones * 0.1, ones, ones, ones,
            torch.ones(2, 6, dtype=INT32, device=device),
            torch.ones(2, 6, dtype=torch.bool, device=device),
            chain, tree.parents, torch.full((2, 4, 1), -1, dtype=INT32, device=device), status,
        ),
        "likeliest_tokens": (probs, 3),
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(calls("cpu")))
def test_opcheck(device: str, name: str) -> None:
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(OPS, name).default, calls(device)[name], test_utils=utils)


def test_every_tree_op_is_checked() -> None:
    # Attributes of OPS are those that somebody has asked for.
    names = (name.removeprefix("nwor_specpv::") for name in torch._C._dispatch_get_all_op_names())
    ours = {
        name for name in names if name.startswith(("tree_", "accept_", "target_", "likeliest_"))
    }
    assert ours | {"make_coins"} == set(calls("cpu"))


def step(steps, roots, lens, logits, seeds):
    """Draft, accept: everything after the target's forward pass."""
    tree = tree_from_topk(*steps, roots, lens, 9)
    probs = target_probs(logits, temperature=0.8, top_p=0.9)
    coins = make_coins(seeds, lens.long(), 9)
    return accept_sampling(tree.tokens, probs, tree.first_child, tree.next_sibling, *coins)


def step_inputs(device: str):
    _, tokens, scores, kept = drafted(2, 3, 3, random.Random(2))
    steps = [[part.to(device) % 50 for part in parts] for parts in (tokens, scores, kept)]
    steps[1] = [part.to(device) for part in scores]
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 9, 50, generator=generator) * 2).to(device)
    lens = torch.tensor([3, 4], dtype=INT32, device=device)
    return steps, torch.tensor([1, 2], device=device), lens, logits, lens.long() + 9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiles_whole(device: str, dynamic: bool) -> None:
    given = step_inputs(device)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for got, expected in zip(compiled(*given), step(*given), strict=True):
        assert torch.equal(got, expected)


def test_fake_tensors_give_shapes_and_touch_nothing() -> None:
    with FakeTensorMode():
        chain = torch.empty(3, 70, dtype=torch.int64, device="cuda")
        tree = tree_from_chain(chain, torch.empty(3, dtype=INT32, device="cuda"))
        assert tree.mask.shape == (3, 70, 2)
        assert tree.mask.device.type == "cuda"
        path, counts, following = accept_greedy(chain, chain, tree.first_child, tree.next_sibling)
        assert (path.shape, counts.shape, following.dtype) == ((3, 70), (3,), torch.int64)
        logits = torch.empty(3, 70, 11, dtype=torch.bfloat16, device="cuda")
        assert target_probs(logits).dtype == torch.float32
        best, log_probs = likeliest_tokens(logits, 4)
        assert (best.shape, best.dtype) == ((3, 70, 4), torch.int64)
        assert (log_probs.shape, log_probs.dtype) == ((3, 70, 4), torch.float32)


@cuda_only
def test_a_graph_replays_with_other_drafts_and_logits() -> None:
    given = step_inputs("cuda")
    step(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*given)
    for turn in range(4):
        generator = torch.Generator().manual_seed(turn)
        given[3].copy_(torch.randn(2, 9, 50, generator=generator) * 2)
        _, tokens, scores, kept = drafted(2, 3, 3, random.Random(turn))
        for parts, fresh in zip(given[0], (tokens, scores, kept), strict=True):
            for part, new in zip(parts, fresh, strict=True):
                part.copy_(new % 50 if fresh is tokens else new)
        graph.replay()
        host = step(
            *([[part.cpu() for part in parts] for parts in given[0]],),
            *(part.cpu() for part in given[1:]),
        )
        for got, expected in zip(captured, host, strict=True):
            assert torch.equal(got.cpu(), expected)
