"""`ngram_lookup` and `certain_logits` against plain Python, on every device."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.ops import certain_logits, ngram_lookup
from tests.python.specpv.contexts import DEVICES

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))


def slow_lookup(text: list[int], shortest: int, longest: int, count: int) -> tuple[list[int], int]:
    """Every earlier end, the longest match first, the latest of equals."""
    if not text:
        return [0] * count, 0
    for size in range(longest, shortest - 1, -1):
        for stop in range(len(text) - 1, size - 1, -1):
            if text[stop - size : stop] == text[-size:]:
                return [text[stop + i % (len(text) - stop)] for i in range(count)], size
    return text[-1:] * count, 0


@pytest.mark.parametrize("device", DEVICES)
def test_lookups_find_what_a_scan_finds(device: str) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for number in range(60):
        words = rng.choice((1, 2, 5, 30, 2**31 - 1))  # as many different tokens
        capacity = rng.choice((1, 7, 60, 300)) if number < 56 else 9000  # more than a block's share
        texts = []
        for _ in range(rng.randint(1, 4)):
            text = [rng.randrange(words) for _ in range(rng.randint(0, capacity))]
            begin = rng.randrange(1 + len(text))  # what chance alone would never say again
            texts.append((text + text[begin : begin + rng.randrange(8)])[-capacity:])
        room = torch.full((len(texts), capacity + 3), -7, dtype=torch.int32)
        for row, text in enumerate(texts):
            room[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        # Several requests may have one row, and some have none.
        rows = [rng.randrange(-1, len(texts) + 1) for _ in range(rng.randint(1, 6))]
        lens = [len(texts[row]) if 0 <= row < len(texts) else 5 for row in rows]
        shortest = rng.randint(1, 3)
        longest, count = rng.randint(shortest, 16), rng.randint(1, 20)
        guesses, matched = ngram_lookup(
            room.to(device)[:, :capacity],
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(lens, dtype=torch.int32, device=device),
            min_tokens=shortest,
            max_tokens=longest,
            count=count,
        )
        own = [texts[row] if 0 <= row < len(texts) else [] for row in rows]
        expected = [slow_lookup(text, shortest, longest, count) for text in own]
        assert guesses.tolist() == [tokens for tokens, _ in expected]
        assert matched.tolist() == [common for _, common in expected]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("common", range(19))
def test_a_match_has_the_length_that_the_text_repeats(device: str, common: int) -> None:
    text = [*range(100, 140), *range(107, 107 + common)]  # no token twice but in what is repeated
    guesses, matched = ngram_lookup(
        torch.tensor([text], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.tensor([len(text)], dtype=torch.int32, device=device),
        min_tokens=2,
        max_tokens=16,
        count=3,
    )
    assert matched.tolist() == [min(common, 16) if common >= 2 else 0]
    follow = text[7 + common] if common >= 2 else text[-1]
    assert guesses[0, 0].item() == follow


def test_a_text_that_repeats_is_repeated_further() -> None:
    text = torch.tensor([[5, 1, 2, 3, 1, 2, 3]], dtype=torch.int32)
    none, seven = torch.zeros(1, dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    guesses, matched = ngram_lookup(text, none, seven, count=7)
    assert guesses.tolist() == [[1, 2, 3, 1, 2, 3, 1]]
    assert matched.tolist() == [3]
    # Lengths beyond the room are cut to it.
    assert ngram_lookup(text, none, seven + 9, count=7)[0].equal(guesses)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": torch.zeros(2, 5)}, r"text: got .*expected \[rows, capacity\] int32"),
        ({"text": torch.zeros(5, 2, dtype=torch.int32).T}, "stride of 2 between tokens"),
        ({"rows": torch.zeros(1)}, "rows: got"),
        ({"lens": torch.zeros(2, dtype=torch.int32)}, "lens: got"),
        ({"min_tokens": 0}, "got 0 and 5"),
        ({"min_tokens": 6}, "got 6 and 5"),
        ({"max_tokens": 17}, "got 2 and 17"),
        ({"count": 0}, "count: got 0"),
    ],
)
def test_wrong_use_of_a_lookup_is_refused(change: dict[str, Any], message: str) -> None:
    none = torch.zeros(1, dtype=torch.int32)
    given = {"text": torch.zeros(2, 5, dtype=torch.int32), "rows": none, "lens": none, "count": 3}
    with pytest.raises(NworError, match=message):
        ngram_lookup(**(given | change))


def test_both_can_be_traced() -> None:
    one = torch.tensor([1], dtype=torch.int32)
    text = torch.arange(12, dtype=torch.int32).view(2, 6)
    ops = torch.ops.nwor_specpv
    torch.library.opcheck(ops.ngram_lookup.default, (text, one, one, 2, 5, 3))
    logits, tokens = torch.zeros(2, 3, 7), torch.ones(1, 3, dtype=torch.int64)
    torch.library.opcheck(ops.certain_logits.default, (logits, one, one, tokens))


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_that_are_certain(device: str) -> None:
    random.seed(SEED)
    torch.manual_seed(SEED)
    for words in (3, 40, 20000):
        room = torch.randn(5, 4, words, device=device)
        logits = room[:, :3]  # one draft more than there are
        before = room.clone()
        rows = [3, -1, 0, 5]
        starts = [random.randint(-1, 3) for _ in rows]
        tokens = torch.randint(0, words, (4, 6))[:, :3]
        tokens[0, 2] = words  # none of the vocabulary
        ints = {"dtype": torch.int32, "device": device}
        certain_logits(
            logits, torch.tensor(rows, **ints), torch.tensor(starts, **ints), tokens.to(device)
        )
        for row, start, drafts in zip(rows, starts, tokens.tolist(), strict=True):
            for i in range(max(0, start), 3) if 0 <= row < 5 else ():
                before[row, i] = -1e30
                if drafts[i] < words:
                    before[row, i, drafts[i]] = 0
        assert torch.equal(room, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3)}, r"logits: got .*expected \[rows, drafts, vocabulary\]"),
        ({"rows": torch.zeros(1)}, "rows: got"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, "starts: got"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.int32)}, "tokens: got"),
        ({"tokens": torch.zeros(1, 2, dtype=torch.int64)}, r"tokens: got .*expected \[1, 3\]"),
    ],
)
def test_wrong_use_of_certain_logits_is_refused(change: dict[str, Any], message: str) -> None:
    none = torch.zeros(1, dtype=torch.int32)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    given = {"logits": torch.zeros(2, 3, 5), "rows": none, "starts": none, "tokens": tokens}
    with pytest.raises(NworError, match=message):
        certain_logits(**(given | change))
