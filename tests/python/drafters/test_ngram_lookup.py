"""Lookups of the n-gram index against a scan of the whole text; what a long prompt costs."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from nwor_specpv import NworError
from nwor_specpv._C import NgramIndex

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))


def slow_lookup(tokens: list[int], drafts: list[int], count: int) -> list[int]:
    """Every earlier place, the longest match first, the latest of equals."""
    text = tokens + drafts
    for size in (4, 3, 2):
        if len(text) < size:
            continue
        for stop in range(len(tokens) - 1, size - 1, -1):
            if tokens[stop - size : stop] == text[-size:]:
                return tokens[stop : stop + count]
    return []


def test_lookups_find_what_a_scan_finds() -> None:
    """Many tokens at once, first and later on, with few at a time behind them."""
    print(f"seed={SEED}")
    rng, sizes = random.Random(SEED), set()
    for _ in range(25):
        words = rng.choice((1, 3, 8, 30, 2**31 - 1))  # as many different tokens
        index, tokens = NgramIndex(2, 4), []
        for number in range(24):
            most = rng.choice((300, 1500)) if number == 0 or rng.random() < 0.05 else 6
            new = [rng.randrange(words) for _ in range(rng.randrange(most))]
            # What chance alone would never say again.
            begin = rng.randrange(1 + len(tokens))
            new += tokens[begin : begin + rng.randrange(6)]
            index.append(new)
            tokens += new
            drafts = [rng.randrange(words) for _ in range(rng.randrange(4))]
            count = rng.randrange(5)
            found = index.lookup(drafts, count)
            assert found == slow_lookup(tokens, drafts, count)
            sizes.add(len(found))
        assert len(index) == len(tokens)
        assert not tokens or index.last == tokens[-1]
    assert sizes >= {0, 4}


def test_wrong_use_is_refused() -> None:
    index = NgramIndex(2, 4)
    with pytest.raises(NworError, match="it has no token yet"):
        _ = index.last
    with pytest.raises(NworError, match="count: got -1"):
        index.lookup([], -1)


def prompt(tokens: int) -> list[int]:
    rng = random.Random(SEED)
    return [rng.randrange(128_000) for _ in range(tokens)]


def test_a_long_prompt_is_indexed_within_milliseconds() -> None:
    """A step waits for it. Of the processor's time, which other processes do not change much."""
    tokens, best = prompt(32_768), float("inf")
    for _ in range(5):
        started = time.process_time()
        NgramIndex(2, 4).append(tokens)
        best = min(best, time.process_time() - started)
    print(f"{1e3 * best:.1f} ms")
    assert best < 0.04  # 4 ms where it was measured


def test_a_long_prompt_takes_little_memory() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    tokens, count = prompt(131_072), 8
    before = resident()
    held = [NgramIndex(2, 4) for _ in range(count)]
    for index in held:
        index.append(tokens)
    each = (resident() - before) / count / len(tokens)
    print(f"{each:.0f} bytes a token")
    assert each < 120
