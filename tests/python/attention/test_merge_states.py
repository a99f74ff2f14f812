"""merge_states: attention over disjoint tokens, merged by log-sum-exp."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nwor_specpv import merge_states
from tests.python.attention.steps import DEVICES, OUT_TOLERANCE, SEED, row_dtypes

INFINITY = float("inf")


def expected_merge(outs: list[torch.Tensor], lses: list[torch.Tensor]):
    """By the definition, in fp64: every state back to its unnormalised sum, added, normalised."""
    logs = np.stack([lse.cpu().double().numpy() for lse in lses])
    states = np.stack([out.cpu().double().numpy() for out in outs])
    total = np.logaddexp.reduce(logs, axis=0)
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isneginf(logs), 0.0, np.exp(logs - total))
    states = np.where(weights[..., None] == 0.0, 0.0, states)
    return (weights[..., None] * states).sum(axis=0), total


def random_states(count: int, dtype: torch.dtype, device: str, shape=(9, 3, 40)):
    generator = torch.Generator().manual_seed(SEED)
    outs = [torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(count)]
    lses = [(torch.randn(shape[:2], generator=generator) * 8).to(device) for _ in range(count)]
    return outs, lses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 17, 32, 33, 70])
def test_merges_any_number_of_states(device: str, dtype: torch.dtype, count: int) -> None:
    print(f"seed={SEED}")
    outs, lses = random_states(count, dtype, device)
    lses[0][2] = -INFINITY
    out, lse = merge_states(outs, lses)
    expected, expected_lse = expected_merge(outs, lses)
    assert out.dtype == dtype
    assert np.abs(out.cpu().double().numpy() - expected).max() < OUT_TOLERANCE[dtype]
    empty = np.isneginf(expected_lse)  # only where the one state saw nothing
    got = lse.cpu().double().numpy()
    assert (np.isneginf(got) == empty).all()
    assert np.abs(got[~empty] - expected_lse[~empty]).max() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_that_saw_nothing_is_not_read(device: str) -> None:
    outs, lses = random_states(3, torch.float32, device)
    outs[1].fill_(float("nan"))
    lses[1].fill_(-INFINITY)
    out, lse = merge_states(outs, lses)
    without, without_lse = merge_states(outs[::2], lses[::2])
    assert torch.equal(out, without)
    assert torch.equal(lse, without_lse)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_no_state_saw(device: str) -> None:
    outs, lses = random_states(2, torch.float32, device)
    for state in range(2):
        outs[state][4] = float("nan")
        lses[state][4] = -INFINITY
    out, lse = merge_states(outs, lses)
    assert torch.count_nonzero(out[4]) == 0
    assert torch.isneginf(lse[4]).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("device", DEVICES)
def test_one_state_stays_what_it_is(device: str) -> None:
    for dtype in row_dtypes(device):
        outs, lses = random_states(1, dtype, device)
        out, lse = merge_states(outs, lses)
        assert torch.equal(out, outs[0])
        assert torch.equal(lse, lses[0])


@pytest.mark.parametrize("device", DEVICES)
def test_stacked_and_strided_states(device: str) -> None:
    outs, lses = random_states(4, torch.float32, device, shape=(6, 4, 16))
    expected = merge_states(outs, lses)
    stacked = torch.stack(outs), torch.stack(lses)
    strided = (
        [torch.stack([o, o], dim=-1)[..., 0] for o in outs],
        [lse.t().contiguous().t() for lse in lses],
    )
    for states in (stacked, strided):
        for got, wanted in zip(merge_states(*states), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_merge(device: str) -> None:
    out, lse = merge_states(
        [torch.zeros(0, 2, 8, device=device)], [torch.zeros(0, 2, device=device)]
    )
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)
