"""The likeliest tokens of rows of logits, against sorted rows in fp64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nwor_specpv import NworError, likeliest_tokens
from tests.python.tree.forest import DEVICES, SEED

TYPES = [torch.float32, torch.bfloat16, torch.float16]
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def expected(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By a stable sort: the lower id first of equal logits."""
    exact = logits.double().cpu()
    exact = exact.where(exact.isfinite(), -math.inf)
    order = exact.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    total = exact.logsumexp(-1, keepdim=True)
    chances = exact.gather(-1, order)
    return order, torch.where(chances == -math.inf, chances, chances - total)


def check(logits: torch.Tensor, count: int) -> None:
    tokens, log_probs = likeliest_tokens(logits, count)
    assert (tokens.dtype, log_probs.dtype) == (torch.int64, torch.float32)
    assert tokens.device == log_probs.device == logits.device
    order, chances = expected(logits, count)
    assert torch.equal(tokens.cpu(), order)
    torch.testing.assert_close(log_probs.cpu().double(), chances, rtol=1e-6, atol=2e-5)


def random_logits(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, generator: torch.Generator
) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_random_rows(device: str, dtype: torch.dtype) -> None:
    print(f"seed={SEED}")
    rng, generator = random.Random(SEED), torch.Generator().manual_seed(SEED)
    for vocabulary in (1, 2, 7, 8, 31, 33, 255, 257, 1000, 4099, 8191, 8192, 32000):
        shape = rng.choice([(3,), (2, 2), (1, 3, 2), ()])
        logits = random_logits((*shape, vocabulary), dtype, device, generator)
        for count in {1, rng.randrange(1, 33), 8, 32}:
            check(logits, min(count, vocabulary))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("vocabulary", "count"), [(40000, 32), (128256, 8), (151936, 5), (1 << 20, 32)]
)
def test_large_vocabularies(device: str, vocabulary: int, count: int) -> None:
    print(f"seed={SEED}")
    generator = torch.Generator().manual_seed(SEED)
    logits = random_logits((2, vocabulary), torch.bfloat16, device, generator)
    check(logits, count)
    check(logits.float(), count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 4, 32])
def test_of_equals_the_lower_id_comes_first(device: str, dtype: torch.dtype, count: int) -> None:
    print(f"seed={SEED}")
    generator = torch.Generator().manual_seed(SEED)
    for vocabulary in (32, 1003, 32000):
        check(torch.zeros(2, vocabulary, dtype=dtype, device=device), count)
        few = torch.randint(0, 3, (3, vocabulary), generator=generator)
        check(few.to(dtype).to(device), count)
        rare = (torch.rand(3, vocabulary, generator=generator) < 10 / vocabulary).to(dtype)
        check((rare * 5).to(device), count)
        signed = torch.zeros(vocabulary, dtype=dtype, device=device)
        signed[::2] = -0.0
        check(signed, count)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_order(device: str) -> None:
    """The best tokens next to each other, at either end, and all in the share of one thread."""
    ascending = torch.arange(20000.0, device=device) / 1000
    check(torch.stack([ascending, ascending.flip(0)]), 32)
    strided = torch.randn(70000, generator=torch.Generator().manual_seed(1)).to(device)
    for apart in (4096, 8192):  # what the threads of a block read at once
        one = strided.clone()
        one[5::apart] += 100
        check(one, 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocabulary", [9, 1000, 32000])
def test_what_is_no_finite_number_has_no_chance(
    device: str, dtype: torch.dtype, vocabulary: int
) -> None:
    print(f"seed={SEED}")
    generator = torch.Generator().manual_seed(SEED)
    count = min(vocabulary, 8)
    wrong = torch.tensor([-math.inf, math.inf, math.nan])
    for share in (0.3, 1 - 4 / vocabulary, 1.0):
        logits = random_logits((4, vocabulary), torch.float32, "cpu", generator)
        chosen = torch.rand(4, vocabulary, generator=generator) < share
        kinds = wrong[torch.randint(0, 3, (4, vocabulary), generator=generator)]
        check(logits.where(~chosen, kinds).to(dtype).to(device), count)
    nothing = torch.full((2, vocabulary), -math.inf, dtype=dtype, device=device)
    tokens, log_probs = likeliest_tokens(nothing, count)
    assert tokens.tolist() == 2 * [list(range(count))]
    assert log_probs.tolist() == 2 * [[-math.inf] * count]


@pytest.mark.parametrize("device", DEVICES)
def test_largest_and_smallest_numbers(device: str) -> None:
    logits = torch.full((1, 3000), -3e38, device=device)
    logits[0, 1234], logits[0, 7] = 3e38, -1e-45
    tokens, log_probs = likeliest_tokens(logits, 3)
    assert tokens.tolist() == [[1234, 7, 0]]
    assert log_probs[0, 0] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_may_lie_anywhere(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    wide = random_logits((4, 3, 2011), dtype, device, generator)
    for part in (
        wide[:, 1],
        wide[::2, :, :1000],
        wide[..., 3:1003],  # no row begins at a multiple of 16 bytes
        wide.transpose(0, 1),
        wide.permute(2, 1, 0),
        wide[:1].expand(5, 3, 2011),
    ):
        count = min(8, part.shape[-1])
        check(part, count)
        for got, same in zip(
            likeliest_tokens(part, count), likeliest_tokens(part.contiguous(), count), strict=True
        ):
            assert torch.equal(got, same)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [1003, 32000])
def test_a_row_gives_the_same_bits_in_every_batch(device: str, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = random_logits((37, vocabulary), torch.bfloat16, device, generator)
    tokens, log_probs = likeliest_tokens(logits, 8)
    for first, number in ((0, 1), (5, 1), (36, 1), (11, 20)):
        part = likeliest_tokens(logits[first : first + number], 8)
        assert torch.equal(part[0], tokens[first : first + number])
        assert torch.equal(part[1], log_probs[first : first + number])
    again = likeliest_tokens(logits, 8)
    assert torch.equal(again[1], log_probs)
    # Fewer are the first of more.
    assert torch.equal(likeliest_tokens(logits, 3)[1], log_probs[:, :3])


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    tokens, log_probs = likeliest_tokens(torch.empty(0, 3, 11, device=device), 4)
    assert tokens.shape == log_probs.shape == (0, 3, 4)


BAD = [
    (torch.zeros(2, 5), 0, r"^count: got 0, expected 1 .. 5"),
    (torch.zeros(2, 5), 6, r"^count: got 6, expected 1 .. 5"),
    (torch.zeros(2, 50), 33, r"^count: got 33, expected 1 .. 32"),
    (torch.zeros(2, 50), -1, r"^count: got -1, expected 1 .. 32"),
    (torch.tensor(1.0), 1, r"^logits: got sizes \[\], expected \[.., vocabulary\]"),
    (torch.zeros(2, 0), 1, r"^logits: got a vocabulary of 0, expected 1 .. 1048576"),
    (torch.zeros(2, 5).long(), 1, r"^logits: got dtype Long"),
    (torch.zeros(2, 5).double(), 1, r"^logits: got dtype Double"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(BAD)))
def test_wrong_arguments_are_named(device: str, case: int) -> None:
    logits, count, message = BAD[case]
    with pytest.raises(NworError, match=message):
        likeliest_tokens(logits.to(device), count)


@cuda_only
def test_a_graph_replays_with_other_logits() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = random_logits((6, 32000), torch.bfloat16, "cuda", generator)
    likeliest_tokens(logits, 8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = likeliest_tokens(logits, 8)
    for _ in range(3):
        logits.copy_(random_logits((6, 32000), torch.bfloat16, "cpu", generator))
        graph.replay()
        for got, direct in zip(captured, likeliest_tokens(logits, 8), strict=True):
            assert torch.equal(got, direct)


@cuda_only
def test_devices_agree() -> None:
    generator = torch.Generator().manual_seed(5)
    for dtype in TYPES:
        logits = random_logits((9, 5001), dtype, "cpu", generator)
        tokens, log_probs = likeliest_tokens(logits, 32)
        there = likeliest_tokens(logits.cuda(), 32)
        assert torch.equal(there[0].cpu(), tokens)
        torch.testing.assert_close(there[1].cpu(), log_probs, rtol=1e-6, atol=1e-5)
