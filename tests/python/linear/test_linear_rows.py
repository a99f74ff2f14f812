"""linear_rows: torch's linear in float64 as the reference, and rows that do not see each other."""

from __future__ import annotations

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.ops import linear_rows
from tests.python.specpv.contexts import seeded

OP = torch.ops.nwor_specpv.linear_rows.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_a_linear_layer(dtype: torch.dtype, bias: bool) -> None:
    rng = seeded()
    for _ in range(8):
        rows, outputs, depth = rng.randrange(1, 20), rng.randrange(1, 200), rng.randrange(1, 300)
        x = torch.randn(2, rows, depth).to(dtype)
        weight = torch.randn(outputs, depth).to(dtype)
        added = torch.randn(outputs).to(dtype) if bias else None
        expected = x.double() @ weight.double().T + (0 if added is None else added.double())
        got = linear_rows(x, weight, added)
        assert got.dtype == dtype
        size = x.double().abs() @ weight.double().abs().T + expected.abs()
        assert ((got.double() - expected).abs() <= size * torch.finfo(dtype).eps + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    seeded()
    x, weight = torch.randn(23, 576).to(dtype), torch.randn(1000, 576).to(dtype)
    every = linear_rows(x, weight)
    for count in (1, 2, 3, 5, 8, 11):
        assert torch.equal(linear_rows(x[:count], weight), every[:count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_may_be_narrower_than_rows(dtype: torch.dtype) -> None:
    seeded()
    x, weight, bias = torch.randn(5, 70), torch.randn(33, 70).to(dtype), torch.randn(33).to(dtype)
    got = linear_rows(x, weight, bias)
    assert got.dtype == torch.float32
    assert torch.equal(got, linear_rows(x, weight.float(), bias.float()))
    across = torch.stack([weight, weight], -1)[..., 0]  # not contiguous: torch's own product
    torch.testing.assert_close(linear_rows(x, across, bias), got, atol=0.2, rtol=0.02)
    with pytest.raises(NworError, match="input: got"):
        linear_rows(x.to(dtype), weight.float())


def test_layouts_of_all_kinds() -> None:
    seeded()
    wide = torch.randn(6, 80)
    x, weight = wide[:, ::2], torch.randn(40, 30).T
    torch.testing.assert_close(linear_rows(x, weight), x @ weight.T)
    assert linear_rows(torch.randn(0, 40), weight).shape == (0, 30)
    assert linear_rows(torch.randn(40), weight).shape == (30,)


def test_torch_knows_it() -> None:
    x, weight, bias = torch.randn(3, 16), torch.randn(5, 16), torch.randn(5)
    torch.library.opcheck(OP, (x, weight, bias))
    torch.library.opcheck(OP, (x.bfloat16(), weight.bfloat16(), None))
    compiled = torch.compile(lambda a: linear_rows(a, weight, bias) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(x), linear_rows(x, weight, bias) * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 4), torch.zeros(2, 5)), r"input: got sizes \[3, 4\], .* the last one 5"),
        ((torch.zeros(3, 5), torch.zeros(5)), "weight: got 1 dimensions"),
        ((torch.zeros(3, 5).double(), torch.zeros(2, 5)), "input: got Double, expected Float"),
        ((torch.zeros(3, 5), torch.zeros(2, 5), torch.zeros(3)), r"bias: got sizes \[3\]"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(NworError, match=message):
        linear_rows(*arguments)
