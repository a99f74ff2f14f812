"""Products of float8 rows beside the same in float64."""

from __future__ import annotations

import os
import random

import pytest
import torch

from nwor_specpv.vllm.specpv.float8 import multiply, quantise

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
HALF_STEP = 2**-4  # of float8's three bits behind the point, relative to the number
SMALLEST = 2**-10  # half of the smallest step, relative to the scale


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)


def shape_of(number: int) -> tuple[int, int, int]:
    rng = random.Random(SEED + number)
    return rng.randint(1, 40), 16 * rng.randint(1, 20), 16 * rng.randint(1, 12)


def error_of(rows: torch.Tensor) -> torch.Tensor:
    """The largest error of each number."""
    scales = rows.abs().amax(-1, keepdim=True) / 448
    return (rows.abs() * HALF_STEP).maximum(scales.clamp(min=1 / (448 * 512)) * SMALLEST) * 1.0001


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_numbers_are_half_a_step_away_at_most(number: int, dtype: torch.dtype) -> None:
    count, columns, _ = shape_of(number)
    spread = torch.randn(count, columns) * 2  # orders of magnitude
    rows = (torch.randn(count, columns) * 2**spread).to(dtype)
    found, scales = quantise(rows)
    assert found.shape == rows.shape
    assert scales.shape == (count, 1)
    error = (found.double() * scales.double() - rows.double()).abs()
    assert (error <= error_of(rows.double())).all()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_as_far_from_float64_as_their_factors(number: int, dtype: torch.dtype) -> None:
    count, columns, outputs = shape_of(number)
    inputs = (torch.randn(count, columns) * 10 ** torch.randn(count, 1)).to(dtype)
    weights = (torch.randn(outputs, columns) * 10 ** torch.randn(outputs, 1)).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    for added in (None, bias):
        found = multiply(inputs, *quantise(weights), added)
        assert found.shape == (count, outputs)
        assert found.dtype == dtype
        x, w = inputs.double(), weights.double()
        exact = x @ w.T + (0 if added is None else added.double())
        far = error_of(x) @ w.abs().T + x.abs() @ error_of(w).T + error_of(x) @ error_of(w).T
        far += (exact.abs() + far) * torch.finfo(dtype).eps + 1e-4 * (x.abs() @ w.abs().T)
        assert ((found.double() - exact).abs() <= far).all()
        # Errors have no direction, so most of them cancel.
        likely = x.norm(dim=1)[:, None] * w.norm(dim=1) / columns**0.5
        assert (found.double() - exact).norm() < 0.15 * likely.norm()


def test_inputs_may_have_any_number_of_dimensions() -> None:
    weights = quantise(torch.randn(32, 48))
    inputs = torch.randn(2, 3, 48)
    found = multiply(inputs, *weights)
    assert found.shape == (2, 3, 32)
    torch.testing.assert_close(found.view(6, 32), multiply(inputs.view(6, 48), *weights))


def test_rows_of_zeros_are_zeros() -> None:
    inputs, weights = torch.randn(3, 64), torch.randn(32, 64)
    inputs[1], weights[5] = 0, 0
    found = multiply(inputs, *quantise(weights))
    assert (found[1] == 0).all()
    assert (found[:, 5] == 0).all()
    assert found[0].abs().max() > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e-38])
def test_a_row_is_its_own_concern(value: float) -> None:
    """Whatever is in one, the others are as they are without it."""
    inputs, weights = torch.randn(5, 64), torch.randn(32, 64)
    alone = multiply(inputs, *quantise(weights))
    inputs[2, 7] = value
    found = multiply(inputs, *quantise(weights))
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], alone[others])
    weights[4, 9] = value
    found = multiply(inputs, *quantise(weights))
    columns = [i for i in range(32) if i != 4]
    assert torch.equal(found[others][:, columns], alone[others][:, columns])
