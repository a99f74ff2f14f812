"""Lookups that nobody verifies, against a count of what verifying them would have accepted."""

from __future__ import annotations

import itertools
import math
import os
import random
from types import SimpleNamespace

import pytest

from nwor_specpv import _C
from nwor_specpv.vllm.specpv.scouts import Scouts

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
LIMIT, MATCHES = 6, (2, 5)


def text_of(length: int, rng: random.Random) -> list[int]:
    """Pieces that come again, between words of chance."""
    pieces = [[rng.randrange(50) for _ in range(rng.randint(3, 12))] for _ in range(3)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(pieces) if rng.random() < 0.7 else [rng.randrange(50)]
    return text[:length]


def accepted(text: list[int], begin: int) -> list[int]:
    """Of steps from place `begin` on that verify a lookup each, as long as the text goes on."""
    found, place = [], begin
    while True:
        index = _C.NgramIndex(*MATCHES)
        index.append(text[:place])
        pairs = zip(index.lookup([], LIMIT), text[place:], strict=False)
        right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        place += right + 1  # the target's own token behind them
        if place > len(text):
            return found
        found.append(right)


def latest(trials: list[int]) -> list[int]:
    """Those of the latest 32 tokens, and three at least."""
    kept, tokens = [], 0
    for right in reversed(trials):
        if len(kept) >= 3 and tokens >= 32:
            break
        kept.append(right)
        tokens += right + 1
    return kept[::-1]


def serve(
    scouts: Scouts, texts: dict[str, list[int]], begin: int, end: int, tokens: int = 1
) -> None:
    """Steps which add so many tokens to every text, until it is looked at with `end` of them."""
    lengths = sorted({*range(begin, end, tokens), end})
    for length in lengths:
        requests = {
            name: SimpleNamespace(all_token_ids=text[:length]) for name, text in texts.items()
        }
        last = 1 if length != end and length != begin else 4  # looks are at some steps only
        for _ in range(last):
            scouts.look(requests, requests)


def test_trials_are_what_steps_with_guesses_would_accept() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for _ in range(20):
        texts = {f"r{i}": text_of(160, rng) for i in range(rng.randint(1, 5))}
        begin = rng.randint(5, 100)
        scouts = Scouts(LIMIT, MATCHES)
        serve(scouts, texts, begin, 160, rng.randint(1, 7))
        for drafts in (1, 2, LIMIT):
            means = []
            for name, text in texts.items():
                expected = latest(accepted(text, begin))
                trials = scouts._scouts[name].trials
                assert trials.trials == expected
                right = trials.right  # of the trial that is not over
                whole = [*expected, right] if right > max(expected) else expected
                means.append(sum(1 + min(right, drafts) for right in whole) / len(whole))
            tokens, error = scouts.tokens(drafts)
            assert tokens == pytest.approx(sum(means) / len(means))
            assert 0 <= error < 1 + drafts


def test_the_error_is_that_of_a_mean() -> None:
    """Of many groups of requests, two thirds are as near as the error says."""
    rng, near, truth = random.Random(7), 0, []
    found = []
    for _ in range(120):
        scouts = Scouts(LIMIT, MATCHES)
        serve(scouts, {f"r{i}": text_of(140, rng) for i in range(8)}, 100, 140)
        found.append(scouts.tokens(LIMIT))
        truth.append(found[-1][0])
    mean = sum(truth) / len(truth)
    near = sum(abs(tokens - mean) < error for tokens, error in found)
    assert 0.5 < near / len(found) < 0.95


def test_nothing_is_said_of_too_little() -> None:
    text = text_of(100, random.Random(3))
    scouts = Scouts(LIMIT, MATCHES)
    assert scouts.tokens(4) is None
    serve(scouts, {"a": text}, 50, 51)
    assert scouts.tokens(4) is None
    serve(scouts, {"a": text}, 52, 90)
    assert scouts.tokens(4) is not None
    serve(scouts, {"a": text} | {f"r{i}": text for i in range(9)}, 91, 91)
    assert len(scouts._scouts) == 8
    assert scouts.tokens(4) is None  # most requests are new
    serve(scouts, {"r1": text}, 92, 92)
    assert list(scouts._scouts) == ["r1"]  # the others have ended


def test_long_texts_are_read_one_a_look() -> None:
    """Reading them takes time: what lies far back is left out."""
    text = list(range(50_000))
    text[10:20] = text[49_990:50_000] = range(-10, 0)  # comes again, but is too far
    scouts, request = Scouts(LIMIT, MATCHES), SimpleNamespace(all_token_ids=text[:])
    requests = {f"r{i}": request for i in range(3)}
    for looks in range(1, 4):
        for _ in range(4):
            scouts.look(requests, requests)
        assert len(scouts._scouts) == looks
    for piece, right in ((text[20:60], 0), (text[40_000:40_100], LIMIT)):
        request.all_token_ids += piece
        for _ in range(4):
            scouts.look(requests, requests)
        for scout in scouts._scouts.values():
            assert set(scout.trials.trials[-4:]) == {right}


def test_texts_without_a_match_yield_a_token_a_step() -> None:
    scouts = Scouts(LIMIT, MATCHES)
    serve(scouts, {"a": list(range(100))}, 50, 100)
    tokens, error = scouts.tokens(LIMIT)
    assert tokens == 1.0
    assert not math.isnan(error)
