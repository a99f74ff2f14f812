"""How finely prefixes are cut, against FlashAttention-3's planner and a simulated device."""

from __future__ import annotations

import heapq
import math
import os
import random

from nwor_specpv.vllm.backend.prefix_schedule import BLOCK, pieces_of_rows, pretended_sms

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
SMS, SPLITS = 132, 32


def planner(prefixes: list[int], kv_heads: int, num_sms: int) -> list[int]:
    """Pieces of each prefix, as FlashAttention-3's planner cuts it for so many SMs."""
    blocks = [math.ceil(tokens / BLOCK) for tokens in prefixes]
    each = math.ceil(1.1 * sum(blocks) * kv_heads / num_sms)
    return [max(1, min(SPLITS, math.ceil(n / each))) if each else 1 for n in blocks]


def finish(prefixes: list[int], kv_heads: int, pieces: list[int]) -> float:
    """When the last SM ends, in blocks; each takes the next piece when it is free."""
    free = [0.0] * SMS
    for tokens, count in zip(prefixes, pieces, strict=True):
        blocks = math.ceil(tokens / BLOCK)
        each = math.ceil(blocks / count)
        for _ in range(kv_heads):
            for piece in range(count):
                size = max(0, min(each, blocks - piece * each))
                heapq.heapreplace(free, free[0] + size + 1)
    return max(free)


def test_waves_are_filled_where_the_planner_does_not_cut() -> None:
    for tokens in (8192, 30720):
        prefixes = [tokens] * 24
        sms = pretended_sms(sum(prefixes), 24, 24 * 5, 8, SMS, SPLITS)
        assert planner(prefixes, 8, SMS) == [1] * 24
        assert planner(prefixes, 8, sms) == [2] * 24
        own, finer = (finish(prefixes, 8, planner(prefixes, 8, n)) for n in (SMS, sms))
        assert finer < 0.8 * own


def test_few_kv_heads_leave_a_second_wave_nearly_empty() -> None:
    """48 prefixes are cut in three by the planner: 144 pieces for 132 SMs."""
    prefixes = [30720] * 24
    for rows in (1, 17):
        sms = pretended_sms(sum(prefixes), 24, 24 * rows, 2, SMS, SPLITS)
        own, finer = (finish(prefixes, 2, planner(prefixes, 2, n)) for n in (SMS, sms))
        assert finer < 0.75 * own


def test_rows_of_a_piece() -> None:
    assert [pieces_of_rows(packed, 64) for packed in (1, 64, 65, 192, 193)] == [1, 1, 1, 1, 2]
    assert [pieces_of_rows(packed, 128) for packed in (64, 128, 129, 257)] == [1, 1, 2, 3]


def test_what_fills_the_device_is_left_as_it_is() -> None:
    for requests, tokens in ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (1, 32768), (8, 32768)):
        rows = requests * 5
        assert pretended_sms(requests * tokens, requests, rows, 8, SMS, SPLITS) == SMS


def test_no_batch_becomes_worse() -> None:
    """Random batches whose prefixes are alike, and some tokens longer than was known."""
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for _ in range(300):
        requests, kv_heads = rng.randint(1, 64), rng.choice((1, 2, 4, 8))
        tokens = rng.randint(1, 60000)
        prefixes = [max(1, tokens - rng.randint(0, min(tokens, 200))) for _ in range(requests)]
        sms = pretended_sms(sum(prefixes), requests, 5 * requests, kv_heads, SMS, SPLITS)
        assert sms >= SMS
        prefixes = [n + rng.randint(0, 8) for n in prefixes]
        own, chosen = (
            finish(prefixes, kv_heads, planner(prefixes, kv_heads, n)) for n in (SMS, sms)
        )
        assert chosen <= 1.05 * own + 2, (requests, kv_heads, tokens, sms)


def test_nothing_to_cut() -> None:
    assert pretended_sms(0, 8, 40, 8, SMS, SPLITS) == SMS
    assert pretended_sms(100, 0, 0, 8, SMS, SPLITS) == SMS
    assert pretended_sms(24 * 30720, 24, 120, 8, SMS, 1) == SMS
