"""attention_inputs and layer_output in every type, size and layout: kernels on CUDA, else torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from nwor_specpv.ops import attention_inputs, layer_output
from tests.python.decoder.test_decoder_rows import (
    EPSILON,
    INPUTS,
    OUTPUT,
    Sizes,
    input_arguments,
    output_arguments,
)
from tests.python.specpv.contexts import DEVICES, seeded

HALVES = (torch.float16, torch.bfloat16)
# Types of rows and of matrices.
TYPES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32 and float16": (torch.float32, torch.float16),
    "float32 and bfloat16": (torch.float32, torch.bfloat16),
}
# Of the largest value: a few roundings of the narrower type.
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MATRICES = ("query", "key", "value", "attention", "gate", "up", "down")
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

Arguments = dict[str, Any]


def wide_sizes(rng: random.Random) -> Sizes:
    """Those that vectors of eight divide, those that they do not, and rows of several turns."""
    sizes = Sizes(rng)
    sizes.dim = rng.choice([2, 6, 16, 32, 48, 64, 80, 128, 256])
    sizes.hidden = rng.choice([1, 40, 200, 263, 512, 1032, 3001, 8200])
    sizes.intermediate = rng.choice([1, 24, 77, 256, 520])
    return sizes


def scaled(own: Arguments) -> Arguments:
    """Matrices whose products are about as large as what they multiply."""
    return {
        name: value / value.shape[1] ** 0.5 if name in MATRICES else value
        for name, value in own.items()
    }


def in_types(own: Arguments, types: str, device: str) -> Arguments:
    rows, matrices = TYPES[types]
    return {
        name: value.to(device, matrices if name in MATRICES else rows)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in own.items()
    }


def in_double(own: Arguments) -> Arguments:
    return {n: v.double().cpu() if isinstance(v, torch.Tensor) else v for n, v in own.items()}


def norm_reference(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = rows.reshape(*rows.shape[:-1], -1, weight.shape[-1])
    squares = torch.einsum("...i,...i->...", parts, parts) / weight.shape[-1]
    return (parts * weight / (squares + EPSILON).sqrt()[..., None]).reshape(rows.shape)


def trust(rows: torch.Tensor) -> torch.Tensor:
    """How far values are to be trusted that a norm makes of these, whose errors are those of values
    about 1: by their size, at most 1. Nearly nothing, it is all rounding errors afterwards."""
    return rows.square().mean(-1, keepdim=True).sqrt().clamp(max=1.0)


# What is expected, and how far it is to be trusted.
Expected = tuple[torch.Tensor, torch.Tensor]


def inputs_reference(own: Arguments) -> list[Expected]:
    """In float64; a rotation by indices: channel i turns against its partner."""
    own = in_double(own)
    normed, dim = norm_reference(own["hidden"], own["norm"]), own["cos"].shape[1]
    partner = (torch.arange(dim) + dim // 2) % dim
    sign = torch.where(torch.arange(dim) < dim // 2, -1.0, 1.0).double()
    results = []
    for name in ("query", "key", "value"):
        out = torch.einsum("ti,oi->to", normed, own[name])
        if own.get(f"{name}_bias") is not None:
            out = out + own[f"{name}_bias"]
        heads, trusted = out.reshape(len(out), -1, dim), torch.ones(())
        if own.get(f"{name}_norm") is not None:
            trusted = trust(heads)
            heads = norm_reference(heads, own[f"{name}_norm"])
        if name != "value":
            turned = heads[..., partner] * sign
            heads = heads * own["cos"][:, None] + turned * own["sin"][:, None]
        results.append((heads, trusted))
    return results


def output_reference(own: Arguments) -> list[Expected]:
    own = in_double(own)
    sums = own["hidden"] + torch.einsum("ti,oi->to", own["attended"], own["attention"])
    if own["attention_bias"] is not None:
        sums = sums + own["attention_bias"]
    normed = norm_reference(sums, own["norm"])
    gate, up = (torch.einsum("ti,oi->to", normed, own[name]) for name in ("gate", "up"))
    out = sums + torch.einsum("ti,oi->to", gate * torch.sigmoid(gate) * up, own["down"])
    return [(out, trust(sums))]


def results_of(op: Callable, own: Arguments) -> list[torch.Tensor]:
    results = op(**own)
    return list(results) if isinstance(results, tuple) else [results]


def assert_close(op: Callable, own: Arguments, what: str) -> None:
    reference = inputs_reference if op is attention_inputs else output_reference
    matrices = own["value" if op is attention_inputs else "down"].dtype
    expected = reference(own)
    for index, (got, (wanted, trusted)) in enumerate(
        zip(results_of(op, own), expected, strict=True)
    ):
        assert got.dtype == own["hidden"].dtype
        assert got.shape == wanted.shape
        assert got.is_contiguous()
        error = ((got.double().cpu() - wanted).abs() * trusted).max()
        error /= wanted.abs().max().clamp(min=1.0)  # a few values may nearly cancel out
        assert error < CLOSE[matrices], f"{what}, {index}: {error}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_norms", [False, True])
def test_inputs_are_those_of_float64(device: str, types: str, bias: bool, head_norms: bool) -> None:
    rng = seeded()
    for _ in range(6):
        sizes = wide_sizes(rng)
        own = scaled(input_arguments(sizes, bias=bias, head_norms=head_norms))
        if sizes.hidden % 4 == 0 and rng.random() < 0.4:
            own["norm"] = own["norm"].view(rng.choice([2, 4]), -1)
        assert_close(attention_inputs, in_types(own, types, device), str(vars(sizes)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_those_of_float64(device: str, types: str, bias: bool) -> None:
    rng = seeded()
    for _ in range(6):
        sizes = wide_sizes(rng)
        own = in_types(scaled(output_arguments(sizes, bias=bias)), types, device)
        assert_close(layer_output, own, str(vars(sizes)))


def strided(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values, lying otherwise: between others, transposed, off every alignment."""
    last = value.shape[-1]
    poison = float("nan")
    kind = rng.randrange(4)
    if kind == 0:  # a part of longer rows
        room = value.new_full((*value.shape[:-1], last + 8), poison)
        room[..., :last] = value
        return room[..., :last]
    if kind == 1:  # every second channel
        room = value.new_full((*value.shape, 2), poison)
        room[..., 0] = value
        return room[..., 0]
    if kind == 2:  # begins one element late
        room = value.new_full((value.numel() + 1,), poison)
        room[1:] = value.flatten()
        return room[1:].view(value.shape)
    return value.t().contiguous().t() if value.dim() == 2 else value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", ["float32", "bfloat16", "float32 and float16"])
def test_layouts_are_free(device: str, types: str) -> None:
    rng = seeded()
    for _ in range(4):
        sizes = wide_sizes(rng)
        sizes.hidden, sizes.dim = rng.choice([64, 264]), rng.choice([16, 64])
        first = scaled(input_arguments(sizes, bias=True, head_norms=True))
        second = scaled(output_arguments(sizes, bias=True))
        for op, own in ((attention_inputs, first), (layer_output, second)):
            plain = in_types(own, types, device)
            moved = {
                name: strided(value, rng) if isinstance(value, torch.Tensor) else value
                for name, value in plain.items()
            }
            before = {n: v.clone() for n, v in plain.items() if isinstance(v, torch.Tensor)}
            assert_close(op, moved, str(vars(sizes)))
            for name, value in before.items():  # nobody writes into what is given
                assert torch.equal(moved[name], value), name


def exact_arguments(rng: random.Random, dtype: torch.dtype, device: str) -> Arguments:
    """Rows of -1 and 1, whose norm is themselves, and matrices that only pick channels: all that
    is rounded is what stands behind the products."""
    heads, dim = rng.choice([1, 3, 4]), rng.choice([6, 16, 64, 128])
    size, rows = heads * dim, rng.randrange(1, 40)
    eye = torch.eye(size, dtype=dtype, device=device)
    angles = torch.randn(rows, dim, device=device)
    return {
        "hidden": (torch.randint(0, 2, (rows, size), device=device) * 2 - 1).to(dtype),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "norm": torch.randn(size, device=device).to(dtype),
        "epsilon": 0.0,
        **dict.fromkeys(("query", "key", "value"), eye),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_rotations_have_the_bits_of_torchs_operations(device: str, dtype: torch.dtype) -> None:
    rng = seeded()
    for _ in range(4):
        own = exact_arguments(rng, dtype, device)
        query, key, value = attention_inputs(**own)
        heads = (own["hidden"] * own["norm"]).unflatten(1, (-1, own["cos"].shape[1]))
        first, second = heads.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        wanted = heads * own["cos"][:, None] + turned * own["sin"][:, None]
        assert torch.equal(value, heads)
        if device == "cuda" or dtype != torch.float32:  # the CPU's own loops may fuse
            assert torch.equal(query, wanted)
            assert torch.equal(key, wanted)
        else:
            torch.testing.assert_close(query, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gates_and_sums_are_rounded_as_torchs_operations(device: str, dtype: torch.dtype) -> None:
    rng = seeded()
    for _ in range(4):
        inputs = exact_arguments(rng, dtype, device)
        sums, eye = inputs["hidden"], inputs["query"]
        # The sum of input and attention is what the norm is of.
        hidden = sums * torch.randint(0, 2, sums.shape, device=device).to(dtype)
        up = eye * torch.randn(len(eye), device=device).to(dtype)[:, None]
        own = {
            "hidden": hidden,
            "attended": sums - hidden,
            "attention": eye,
            "attention_bias": None,
            "norm": inputs["norm"],
            "epsilon": 0.0,
            "gate": eye,
            "up": up,
            "down": eye,
        }
        normed = sums * inputs["norm"]
        gated = silu(normed) * linear(normed, up)
        wanted = (sums.float() + gated.float()).to(dtype)
        torch.testing.assert_close(
            layer_output(**own), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", ["bfloat16", "float32 and bfloat16"])
def test_rows_are_alone_and_may_be_none(device: str, types: str) -> None:
    rng = seeded()
    sizes = wide_sizes(rng)
    sizes.rows = 5
    first = in_types(scaled(input_arguments(sizes, bias=True, head_norms=True)), types, device)
    second = in_types(scaled(output_arguments(sizes, bias=True)), types, device)
    for op, own, names in (
        (attention_inputs, first, ("hidden", "cos", "sin")),
        (layer_output, second, ("hidden", "attended")),
    ):
        clean = results_of(op, own)
        own["hidden"] = own["hidden"].clone()
        own["hidden"][3] = float("nan")
        for got, wanted in zip(results_of(op, own), clean, strict=True):
            assert got[3].isnan().all()
            assert torch.equal(got[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]])
        none = own | {name: own[name][:0] for name in names}
        for got, wanted in zip(results_of(op, none), clean, strict=True):
            assert got.shape == (0, *wanted.shape[1:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", ["bfloat16", "float32 and bfloat16"])
def test_torch_knows_every_type(device: str, types: str) -> None:
    sizes = wide_sizes(seeded())
    first = in_types(scaled(input_arguments(sizes, bias=True, head_norms=True)), types, device)
    second = in_types(scaled(output_arguments(sizes, bias=True)), types, device)
    for op, own in ((INPUTS, first), (OUTPUT, second)):
        torch.library.opcheck(op, tuple(own.values()))


@cuda_only
@pytest.mark.parametrize("types", TYPES)
def test_a_graph_replays_them_over_what_its_inputs_hold_by_then(types: str) -> None:
    rng = seeded()
    sizes = wide_sizes(rng)
    sizes.hidden, sizes.dim = 264, 64
    first = in_types(scaled(input_arguments(sizes, bias=True, head_norms=True)), types, "cuda")
    second = in_types(scaled(output_arguments(sizes, bias=True)), types, "cuda")
    for op, own in ((attention_inputs, first), (layer_output, second)):
        results_of(op, own)  # cuBLAS makes itself ready
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = results_of(op, own)
        for _ in range(2):
            for name in ("hidden", "cos", "sin", "attended"):
                if name in own:
                    own[name].normal_()
            graph.replay()
            for got, wanted in zip(captured, results_of(op, own), strict=True):
                assert torch.equal(got, wanted)
