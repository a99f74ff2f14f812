"""Logits to probabilities, against sorted lists in fp64."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from nwor_specpv import NworError, describe_status, target_probs
from tests.python.tree.forest import DEVICES, SEED, ancestors, random_parents


def expected_row(logits: list[float], count: list[int], prompt: list[bool], allowed, o: dict):
    """One row by the definition: lists, sorting, fp64."""
    size = len(logits)
    x = list(logits)
    for v in range(size):
        if count[v] or prompt[v]:
            x[v] = x[v] / o["repetition_penalty"] if x[v] > 0 else x[v] * o["repetition_penalty"]
        if count[v]:
            x[v] -= o["frequency_penalty"] * count[v] + o["presence_penalty"]
        if not allowed(v):
            x[v] = -math.inf
    if o["temperature"] == 0:
        return [float(v == x.index(max(x))) for v in range(size)]
    largest = max(x)
    weight = [math.exp((value - largest) / o["temperature"]) for value in x]
    order = sorted(range(size), key=lambda v: -weight[v])
    if 0 < o["top_k"] < size:
        order = order[: o["top_k"]]
    total, taken, kept = sum(weight[v] for v in order), 0.0, []
    for v in order:
        kept.append(v)
        taken += weight[v]
        if taken >= o["top_p"] * total:
            break
    left = {v for v in kept if weight[v] >= o["min_p"]}
    total = sum(weight[v] for v in left)
    return [weight[v] / total if v in left else 0.0 for v in range(size)]


def bits_of(allowed: torch.Tensor) -> torch.Tensor:
    """[..., V] bool as int32 words."""
    size = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed.long(), (0, -size % 32))
    words = (padded.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return words.where(words < 2**31, words - 2**32).int()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 7},
    {"top_p": 0.8},
    {"top_k": 20, "top_p": 0.5, "temperature": 1.7},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 1},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.2},
    {"repetition_penalty": 0.7, "temperature": 0.0, "presence_penalty": 0.9},
    {
        "temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02,
        "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1,
    },
]  # fmt: skip
NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [5, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_follows_the_order_of_the_steps(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED + vocabulary)
    generator = torch.Generator().manual_seed(SEED)
    batch, rows = len(OPTIONS), 3
    # Half precision has few values: spread them, so that no two meet by chance at a boundary; by a
    # distance of which penalties are no multiples, or tokens with and without them would meet.
    logits = torch.stack(
        [torch.randperm(vocabulary, generator=generator) for _ in range(batch * rows)]
    ).view(batch, rows, vocabulary) * (19.37 / vocabulary)
    logits = (logits - 10).to(dtype)
    counts = torch.randint(0, 3, (batch, vocabulary), generator=generator, dtype=torch.int32)
    prompt = torch.rand(batch, vocabulary, generator=generator) < 0.3
    allowed = torch.rand(batch, rows, vocabulary, generator=generator) < 0.7
    allowed[..., rng.randrange(vocabulary)] = True
    parents = [random_parents(rows, rng) for _ in range(batch)]
    tokens = torch.randint(0, vocabulary, (batch, rows), generator=generator)
    chosen = [{**NEUTRAL, **one} for one in OPTIONS]
    columns = {
        name: torch.tensor(
            [one[name] for one in chosen], dtype=torch.int32 if name == "top_k" else torch.float32
        ).to(device)
        for name in NEUTRAL
    }
    status = torch.full((batch,), 3, device=device)
    got = target_probs(
        logits.to(device),
        **columns,
        output_counts=counts.to(device),
        prompt_mask=prompt.to(device),
        tokens=tokens.to(device),
        parents=torch.tensor(parents, dtype=torch.int32, device=device),
        bitmask=bits_of(allowed).to(device),
        status=status,
    ).cpu()
    assert got.dtype == torch.float32
    assert status.tolist() == [0] * batch
    for b in range(batch):
        for row in range(rows):
            seen = counts[b].tolist()
            for above in ancestors(parents[b], row)[:-1]:
                seen[tokens[b, above]] += 1
            # Numbers as float32 has them.
            options = {name: float(column[b]) for name, column in columns.items()}
            options["top_k"] = int(columns["top_k"][b])
            expected = expected_row(
                logits[b, row].float().tolist(),
                seen,
                prompt[b].tolist(),
                allowed[b, row].tolist().__getitem__,
                options,
            )
            wrong = (got[b, row].double() - torch.tensor(expected, dtype=torch.float64)).abs()
            bound = 1e-4 if dtype == torch.float32 else 2e-2
            ties = dtype != torch.float32 and vocabulary > 300
            assert ties or wrong.max() < bound, (b, row, options)
            assert abs(got[b, row].double().sum() - 1) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_equals_stay_together(device: str) -> None:
    logits = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0]]], device=device)
    third = pytest.approx([0.0, 1 / 3, 1 / 3, 1 / 3, 0.0], abs=1e-6)
    assert target_probs(logits, top_k=1)[0, 0].tolist() == third
    assert target_probs(logits, top_p=0.1)[0, 0].tolist() == third
    assert target_probs(logits, min_p=1.0)[0, 0].tolist() == third
    assert target_probs(logits, temperature=0.0)[0, 0].tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_may_be_one_for_all_and_logits_any_strides(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 40, generator=generator).to(device)
    expected = torch.softmax(logits.double() / 0.7, -1)
    assert (target_probs(logits, temperature=0.7) - expected).abs().max() < 1e-6
    strided = logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(
        target_probs(strided, temperature=0.7), target_probs(logits, temperature=0.7)
    )
    assert (target_probs(logits) - torch.softmax(logits.double(), -1)).abs().max() < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_at_the_ends_of_their_ranges(device: str) -> None:
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1)).to(device)
    for many in (40, 2**31 - 1, 2**31, 2**32 + 1, 2**70, np.int64(50)):
        assert torch.equal(target_probs(logits, top_k=many), target_probs(logits))
    assert torch.equal(target_probs(logits, top_k=np.int32(1)), target_probs(logits, top_k=1))
    assert torch.equal(target_probs(logits, temperature=np.float32(2)), target_probs(logits / 2))
    flat = target_probs(logits, temperature=3.3e38)
    assert (flat - 1 / 40).abs().max() < 1e-6
    greedy = target_probs(logits, temperature=0.0)
    for least in ({"top_p": 1e-50}, {"temperature": 1e-60}):
        assert torch.equal(target_probs(logits, **least), greedy)


@pytest.mark.parametrize("device", DEVICES)
def test_impossible_tokens_may_be_minus_infinity(device: str) -> None:
    logits = torch.full((1, 1, 9), -float("inf"), device=device)
    logits[0, 0, 4] = -3e38
    for options in ({}, {"temperature": 1e-30}, {"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}):
        assert target_probs(logits, **options)[0, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]


WRONG = [
    ({"temperature": -1.0}, "parameter", r"temperature\[1\]: got -1, expected 0 or more"),
    ({"temperature": float("nan")}, "parameter", r"temperature\[1\]: got nan"),
    ({"top_k": -2}, "parameter", r"top_k\[1\]: got -2, expected 0 or more"),
    ({"top_p": 0.0}, "parameter", r"top_p\[1\]: got 0, expected more than 0, at most 1"),
    ({"top_p": 1.5}, "parameter", r"top_p\[1\]: got 1.5"),
    ({"min_p": 1.1}, "parameter", r"min_p\[1\]: got 1.1, expected 0 .. 1"),
    ({"repetition_penalty": 0.0}, "parameter", r"repetition_penalty\[1\]: got 0"),
    ({"frequency_penalty": float("inf")}, "parameter", r"frequency_penalty\[1\]: got inf"),
    ({"presence_penalty": float("nan")}, "parameter", r"presence_penalty\[1\]: got nan"),
    ({"logits": float("nan")}, "logits", r"logits\[1, 1\]: got NaN"),
    ({"logits": float("inf")}, "logits", r"logits\[1, 1\]: got NaN, \+infinity"),
    ({"bitmask": 0}, "logits", r"logits\[1, 1\]: got NaN, .* or no possible token"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_wrong_values_are_named_or_marked(device: str, case: int) -> None:
    change, label, message = WRONG[case]
    ((name, value),) = change.items()
    logits = torch.zeros(2, 2, 40)
    given: dict[str, Any] = {}
    if name == "logits":
        logits[1, 1, 39] = value
    elif name == "bitmask":
        given["bitmask"] = torch.full((2, 2, 2), -1, dtype=torch.int32)
        given["bitmask"][1, 1] = value
        given["bitmask"][1, 1, 1] = 1 << 20  # a bit beyond the vocabulary allows nothing
    else:
        dtype = torch.int32 if name == "top_k" else torch.float32
        given[name] = torch.tensor([NEUTRAL[name], value], dtype=dtype)
    given = {key: part.to(device) for key, part in given.items()}
    if device == "cpu":
        with pytest.raises(NworError, match=message):
            target_probs(logits, **given)
        return
    status = torch.full((2,), 9, device=device)
    got = target_probs(logits.to(device), **given, status=status)
    assert (got[0] == 1 / 40).all()
    assert (got[1, 1] == 0).all()
    words = status.tolist()
    assert words[0] == 0
    assert describe_status(words[1]).startswith(label)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 2.5}, "top_k: got 2.5, expected an integer"),
        ({"top_k": "a"}, "top_k: got 'a', expected an integer"),
        ({"top_k": None}, "top_k: got None, expected an integer"),
        ({"top_k": -1}, r"top_k\[0\]: got -1, expected 0 or more"),
        ({"top_k": -(2**40)}, f"top_k: got {-(2**40)}, expected 0 or more"),
        ({"temperature": 1e39}, r"temperature: got 1e\+39, expected a float32 number"),
        ({"temperature": 10**400}, "temperature: got 1000.*, expected a float32 number"),
        ({"temperature": None}, "temperature: got None, expected a number"),
        ({"temperature": "a"}, "temperature: got 'a', expected a number"),
        ({"min_p": 1j}, "min_p: got 1j, expected a number"),
        ({"presence_penalty": -1e39}, r"presence_penalty: got -1e\+39, expected a float32 number"),
        ({"logits": torch.zeros(2, 40)}, "logits: got sizes"),
        ({"logits": torch.zeros(2, 257, 3)}, "logits: got 257 rows, expected 1 .. 256"),
        ({"logits": torch.zeros(2, 2, 40).double()}, "logits: got dtype Double"),
        ({"temperature": torch.ones(3)}, r"temperature: got sizes \[3\], expected \[2\]"),
        ({"top_k": torch.ones(2)}, "top_k: got dtype Float, expected int32 or int64"),
        ({"top_p": torch.ones(2).double()}, "top_p: got dtype Double, expected float32"),
        ({"output_counts": torch.ones(2, 3).int()}, "output_counts: got sizes"),
        ({"prompt_mask": torch.ones(2, 40)}, "prompt_mask: got"),
        ({"tokens": torch.zeros(2, 2).long()}, "parents: got nothing"),
        ({"bitmask": torch.zeros(2, 2, 1).int()}, "bitmask: got"),
        ({"status": torch.zeros(3).long()}, "status: got sizes"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(NworError, match=message):
        target_probs(**{"logits": torch.zeros(2, 2, 40), **change})
