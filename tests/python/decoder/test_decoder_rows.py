"""attention_inputs and layer_output: against float64, row by row, written with loops."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.ops import attention_inputs, layer_output
from tests.python.specpv.contexts import seeded

INPUTS = torch.ops.nwor_specpv.attention_inputs.default
OUTPUT = torch.ops.nwor_specpv.layer_output.default
EPSILON = 1e-5


class Sizes:
    def __init__(self, rng: random.Random) -> None:
        self.rows = rng.randrange(1, 20)
        self.dim = 2 * rng.randrange(1, 40)
        self.kv_heads = rng.randrange(1, 4)
        self.heads = self.kv_heads * rng.randrange(1, 4)
        self.hidden = rng.randrange(1, 200)
        self.intermediate = rng.randrange(1, 300)


def normalized(row: list[float], weight: list[float]) -> list[float]:
    mean = sum(value * value for value in row) / len(row)
    return [v / math.sqrt(mean + EPSILON) * w for v, w in zip(row, weight, strict=True)]


def product(row: list[float], weight: torch.Tensor, bias: torch.Tensor | None) -> list[float]:
    out = (weight.double() @ torch.tensor(row, dtype=torch.float64)).tolist()
    added = [0.0] * len(out) if bias is None else bias.tolist()
    return [a + b for a, b in zip(out, added, strict=True)]


def rotated(head: list[float], cos: list[float], sin: list[float]) -> list[float]:
    half = len(head) // 2
    turned = [-v for v in head[half:]] + head[:half]
    return [v * c + t * s for v, c, t, s in zip(head, cos, turned, sin, strict=True)]


def input_arguments(sizes: Sizes, *, bias: bool, head_norms: bool) -> dict[str, Any]:
    angles = torch.randn(sizes.rows, sizes.dim)
    outputs = {"query": sizes.heads, "key": sizes.kv_heads, "value": sizes.kv_heads}
    weights = {
        name: torch.randn(count * sizes.dim, sizes.hidden) for name, count in outputs.items()
    }
    added = {f"{name}_bias": torch.randn(weights[name].shape[0]) for name in outputs}
    norms = {f"{name}_norm": torch.randn(sizes.dim) for name in ("query", "key")}
    return {
        "hidden": torch.randn(sizes.rows, sizes.hidden),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "norm": torch.randn(sizes.hidden),
        "epsilon": EPSILON,
        **weights,
        **(added if bias else {}),
        **(norms if head_norms else {}),
    }


def output_arguments(sizes: Sizes, *, bias: bool) -> dict[str, Any]:
    width = sizes.heads * sizes.dim
    return {
        "hidden": torch.randn(sizes.rows, sizes.hidden),
        "attended": torch.randn(sizes.rows, width),
        "attention": torch.randn(sizes.hidden, width),
        "attention_bias": torch.randn(sizes.hidden) if bias else None,
        "norm": torch.randn(sizes.hidden),
        "epsilon": EPSILON,
        "gate": torch.randn(sizes.intermediate, sizes.hidden),
        "up": torch.randn(sizes.intermediate, sizes.hidden),
        "down": torch.randn(sizes.hidden, sizes.intermediate),
    }


def assert_near(got: torch.Tensor, expected: list, what: str) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert got.shape == wanted.shape, what
    error = (got.double() - wanted).abs().max()
    assert error <= 2e-5 * wanted.abs().max(), f"{what}: {error}"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_norms", [False, True])
def test_inputs_are_normalized_projected_and_rotated(bias: bool, head_norms: bool) -> None:
    rng = seeded()
    for _ in range(4):
        sizes = Sizes(rng)
        own = input_arguments(sizes, bias=bias, head_norms=head_norms)
        results = attention_inputs(**own)
        for name, got in zip(("query", "key", "value"), results, strict=True):
            expected = []
            for r, row in enumerate(own["hidden"].tolist()):
                out = product(
                    normalized(row, own["norm"].tolist()), own[name], own.get(f"{name}_bias")
                )
                heads = [out[i : i + sizes.dim] for i in range(0, len(out), sizes.dim)]
                if f"{name}_norm" in own:
                    heads = [normalized(head, own[f"{name}_norm"].tolist()) for head in heads]
                if name != "value":
                    turn = own["cos"][r].tolist(), own["sin"][r].tolist()
                    heads = [rotated(head, *turn) for head in heads]
                expected.append(heads)
            assert_near(got, expected, name)


@pytest.mark.parametrize("bias", [False, True])
def test_the_output_has_both_residuals_and_the_gated_mlp(bias: bool) -> None:
    rng = seeded()
    for _ in range(6):
        own = output_arguments(Sizes(rng), bias=bias)
        expected = []
        for row, attended in zip(own["hidden"].tolist(), own["attended"].tolist(), strict=True):
            brought = product(attended, own["attention"], own["attention_bias"])
            first = [a + b for a, b in zip(row, brought, strict=True)]
            normed = normalized(first, own["norm"].tolist())
            gates, ups = (product(normed, own[name], None) for name in ("gate", "up"))
            # The exponential of a large number would not fit; both forms are the same function.
            gated = [
                (g / (1 + math.exp(-g)) if g > 0 else g * math.exp(g) / (1 + math.exp(g))) * u
                for g, u in zip(gates, ups, strict=True)
            ]
            expected.append(
                [a + b for a, b in zip(first, product(gated, own["down"], None), strict=True)]
            )
        assert_near(layer_output(**own), expected, "output")


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    rng = seeded()
    sizes = Sizes(rng)
    sizes.rows, sizes.hidden, sizes.intermediate = 23, 576, 333
    first = input_arguments(sizes, bias=True, head_norms=True)
    second = output_arguments(sizes, bias=True)
    every, out = attention_inputs(**first), layer_output(**second)
    for count in (1, 2, 3, 5, 6, 7, 8, 9, 16):
        some = {name: first[name][:count] for name in ("hidden", "cos", "sin")}
        for got, wanted in zip(attention_inputs(**{**first, **some}), every, strict=True):
            assert torch.equal(got, wanted[:count])
        some = {name: second[name][:count] for name in ("hidden", "attended")}
        assert torch.equal(layer_output(**{**second, **some}), out[:count])


def padded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, as they lie in a buffer of wider ones."""
    return torch.cat([rows, torch.full_like(rows, float("nan"))], -1)[..., : rows.shape[-1]]


def spread(vector: torch.Tensor) -> torch.Tensor:
    return torch.stack([vector, torch.full_like(vector, float("nan"))], -1)[..., 0]


def test_a_row_has_the_same_bits_however_rows_and_vectors_lie() -> None:
    rng = seeded()
    sizes = Sizes(rng)
    sizes.rows, sizes.hidden, sizes.intermediate = 23, 576, 333
    first = input_arguments(sizes, bias=True, head_norms=True)
    first["cos"], first["sin"] = (first[name][:1].expand(23, -1) for name in ("cos", "sin"))
    second = output_arguments(sizes, bias=True)
    matrices = ("query", "key", "value", "attention", "gate", "up", "down")

    def lying(own: dict[str, Any], count: int) -> dict[str, Any]:
        rows = ("hidden", "attended", "cos", "sin")
        some = {name: value[:count] if name in rows else value for name, value in own.items()}
        for name in some.keys() - {*matrices, "epsilon", "cos", "sin"}:
            some[name] = padded(some[name]) if name in rows else spread(some[name])
        return some

    plain = {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in first.items()
    }
    every, out = attention_inputs(**plain), layer_output(**second)
    for count in (1, 2, 5, 8, 23):
        for got, wanted in zip(attention_inputs(**lying(first, count)), every, strict=True):
            assert torch.equal(got, wanted[:count])
        assert torch.equal(layer_output(**lying(second, count)), out[:count])


@pytest.mark.parametrize("kind", ["bfloat16", "float64", "strided"])
def test_other_types_and_layouts_go_through_torch(kind: str) -> None:
    rng = seeded()
    sizes = Sizes(rng)
    first = input_arguments(sizes, bias=True, head_norms=True)
    second = output_arguments(sizes, bias=False)

    def other(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if kind == "strided":
            return torch.stack([value, value], -1)[..., 0]
        return value.to(getattr(torch, kind))

    for op, own in ((attention_inputs, first), (layer_output, second)):
        want, got = (
            result if isinstance(result, tuple) else (result,)
            for result in (op(**own), op(**{name: other(value) for name, value in own.items()}))
        )
        for a, b in zip(want, got, strict=True):
            error = (a.double() - b.double()).abs().max() / a.abs().max()
            assert error < (0.1 if kind == "bfloat16" else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_may_be_narrower_than_rows(dtype: torch.dtype) -> None:
    """The bits are those of the same values in float32: they are widened and no more."""
    rng = seeded()
    sizes = Sizes(rng)
    first = input_arguments(sizes, bias=True, head_norms=True)
    second = output_arguments(sizes, bias=True)
    matrices = ("query", "key", "value", "attention", "gate", "up", "down")
    for op, own in ((attention_inputs, first), (layer_output, second)):
        narrow = {name: v.to(dtype) if name in matrices else v for name, v in own.items()}
        wide = {name: v.float() if name in matrices else v for name, v in narrow.items()}
        got, wanted = (
            result if isinstance(result, tuple) else (result,)
            for result in (op(**narrow), op(**wide))
        )
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b)
        matrix = "query" if op is attention_inputs else "gate"
        strided = {**narrow, matrix: torch.stack([narrow[matrix]] * 2, -1)[..., 0]}
        through_torch = op(**strided)
        through_torch = through_torch if isinstance(through_torch, tuple) else (through_torch,)
        for a, b in zip(through_torch, wanted, strict=True):
            assert (a - b).abs().max() < 0.1 * b.abs().max()


def test_parts_of_a_row_are_normalized_alone() -> None:
    rng = seeded()
    for layout in ("rows", "strided"):
        sizes = Sizes(rng)
        sizes.hidden *= 3
        own = input_arguments(sizes, bias=False, head_norms=False)
        weight = torch.randn(3, sizes.hidden // 3)
        parts = own["hidden"].tolist()
        size = sizes.hidden // 3
        normed = [
            [
                value
                for i in range(3)
                for value in normalized(row[i * size : (i + 1) * size], weight[i].tolist())
            ]
            for row in parts
        ]
        if layout == "strided":
            own["query"] = torch.stack([own["query"]] * 2, -1)[..., 0]
        got = attention_inputs(**{**own, "norm": weight})[2]
        assert_near(got.flatten(1), [product(row, own["value"], None) for row in normed], "value")


def test_values_that_are_not_numbers_stay_in_their_row() -> None:
    rng = seeded()
    sizes = Sizes(rng)
    sizes.rows = 4
    own = output_arguments(sizes, bias=False)
    clean = layer_output(**own)
    own["hidden"][2] = float("nan")
    dirty = layer_output(**own)
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


def test_torch_knows_them() -> None:
    rng = seeded()
    sizes = Sizes(rng)
    inputs = input_arguments(sizes, bias=True, head_norms=False)
    outputs = output_arguments(sizes, bias=False)
    for op, own in ((INPUTS, inputs), (OUTPUT, outputs)):
        torch.library.opcheck(op, tuple(own.values()))
    compiled = torch.compile(lambda own: layer_output(**own) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(outputs), layer_output(**outputs) * 2)
    none = {**outputs, "hidden": outputs["hidden"][:0], "attended": outputs["attended"][:0]}
    assert layer_output(**none).shape == (0, sizes.hidden)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cos", torch.zeros(3, 5), "cos: got sizes .*an even head size"),
        ("sin", torch.zeros(2, 4), "sin: got sizes"),
        ("norm", torch.zeros(7), "norm: got sizes"),
        ("query", torch.zeros(6, 8), "query: got 6 outputs, expected a multiple of the head size"),
        ("value", torch.zeros(8, 8), "value: got 8 outputs, expected 4 as key"),
        ("key", torch.zeros(4, 9), "key: got sizes"),
        ("value_bias", torch.zeros(3), "value_bias: got sizes"),
        ("query_norm", torch.zeros(5), "query_norm: got sizes"),
        ("hidden", torch.zeros(3, 8).double(), "hidden: got Double on cpu, expected Float"),
        ("hidden", torch.zeros(3, 8).int(), "hidden: got Int, expected float32"),
        ("key", torch.zeros(4, 8).half(), "key: got Half on cpu, expected Float on cpu as query"),
        ("norm", torch.zeros(8).half(), "norm: got Half on cpu, expected Float on cpu as hidden"),
        ("cos", torch.zeros(3, 4).half(), "cos: got Half on cpu, expected Float on cpu as hidden"),
    ],
)
def test_wrong_inputs_are_named(name: str, value: torch.Tensor, message: str) -> None:
    right = {
        "hidden": torch.zeros(3, 8),
        "cos": torch.zeros(3, 4),
        "sin": torch.zeros(3, 4),
        "norm": torch.zeros(8),
        "epsilon": EPSILON,
        **{one: torch.zeros(4, 8) for one in ("query", "key", "value")},
    }
    attention_inputs(**right)
    with pytest.raises(NworError, match=message):
        attention_inputs(**{**right, name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attended", torch.zeros(2, 4), "attended: got sizes"),
        ("attention", torch.zeros(7, 4), "attention: got 7 outputs, expected 8"),
        ("up", torch.zeros(5, 8), "up: got sizes"),
        ("down", torch.zeros(8, 5), "down: got sizes"),
        ("hidden", torch.zeros(8), "hidden: got 1 dimensions"),
        ("norm", torch.zeros(8).half(), "norm: got Half on cpu, expected Float on cpu as hidden"),
    ],
)
def test_wrong_outputs_are_named(name: str, value: torch.Tensor, message: str) -> None:
    right = {
        "hidden": torch.zeros(3, 8),
        "attended": torch.zeros(3, 4),
        "attention": torch.zeros(8, 4),
        "attention_bias": None,
        "norm": torch.zeros(8),
        "epsilon": EPSILON,
        "gate": torch.zeros(6, 8),
        "up": torch.zeros(6, 8),
        "down": torch.zeros(8, 6),
    }
    layer_output(**right)
    with pytest.raises(NworError, match=message):
        layer_output(**{**right, name: value})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_is_the_products_own(dtype: torch.dtype) -> None:
    """Rounded once with it, as torch's modules do."""
    torch.manual_seed(7)
    hidden, value = torch.randn(16, 64).to(dtype), torch.randn(32, 64).to(dtype)
    bias, ones = (20 * torch.randn(32)).to(dtype), torch.ones(64, dtype=dtype)
    angles = torch.zeros(16, 16, dtype=dtype)
    weights = {"query": value, "key": value, "value": value, "value_bias": bias}
    found = attention_inputs(hidden, angles, angles, ones, EPSILON, **weights)[2]
    plain = attention_inputs(hidden, angles, angles, ones, EPSILON, value, torch.eye(64).to(dtype),
                             torch.eye(64).to(dtype))  # fmt: skip
    normed = plain[2].flatten(1)
    assert torch.equal(found.flatten(1), torch.nn.functional.linear(normed, value, bias))


def test_doubles_stay_doubles() -> None:
    hidden = torch.full((2, 8), 1e20, dtype=torch.float64)
    eye, ones = torch.eye(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    angles = torch.zeros(2, 4, dtype=torch.float64)
    value = attention_inputs(hidden, angles, angles, ones, 0.0, eye, eye, eye)[2]
    torch.testing.assert_close(value, torch.ones_like(value), rtol=1e-14, atol=0.0)


def test_shapes_without_data_are_looked_at_too() -> None:
    def meta(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, device="meta")

    weights = [meta(4, 8)] * 3
    with pytest.raises(ValueError, match=r"cos: got sizes \[3, 0\]"):
        INPUTS(meta(3, 8), meta(3, 0), meta(3, 0), meta(8), EPSILON, *weights)
    with pytest.raises(ValueError, match=r"query: got sizes \[6, 8\], expected \[a multiple of 4"):
        INPUTS(meta(3, 8), meta(3, 4), meta(3, 4), meta(8), EPSILON, meta(6, 8), *weights[1:])
    with pytest.raises(ValueError, match="value: got 8 outputs, expected 4 as key"):
        INPUTS(meta(3, 8), meta(3, 4), meta(3, 4), meta(8), EPSILON, *weights[:2], meta(8, 8))
    with pytest.raises(ValueError, match="weight: got 8 inputs, expected 9"):
        torch.ops.nwor_specpv.linear_rows(meta(3, 9), meta(4, 8))
