"""Random rounds against the Python model of the cache: no byte may differ, wrong calls change none.

NWOR_FUZZ_ROUNDS: rounds per dtype (8,000; `make test-all` plays a million). NWOR_TEST_SEED repeats
a run.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections import Counter

import numpy as np
import pytest
import torch

from tests.python.kv_interceptor.cache_model import e4m3_codes
from tests.python.kv_interceptor.fuzz_world import World

ROUNDS = int(os.environ.get("NWOR_FUZZ_ROUNDS", "8000"))
ROUNDS_PER_WORLD = 200
BAD_INPUT_SHARE = 0.25  # of all rounds: one wrong call or more in each

# What a run of this many rounds cannot have missed.
PLAYED = (
    "commits",
    "explicit destinations",
    "chunks",
    "trees",
    "aborts",
    "aborts after a chunk",
    "direct rounds",
    "checked",
)
FALLBACKS = (
    "disabled",
    "fake_tensor",
    "incomplete_staging",
    "slot_mismatch",
    "stale_round",
    "unbound_layer",
)
ENOUGH_ROUNDS = 10_000


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_random_rounds_equal_the_model(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="nwor_specpv")  # fallbacks are part of the game
    seed = int(os.environ.get("NWOR_TEST_SEED") or secrets.randbits(32))
    print(f"seed={seed} rounds={ROUNDS} dtype={dtype}")
    played, tally = 0, Counter()
    for number in range(-(-ROUNDS // ROUNDS_PER_WORLD)):
        rng = random.Random(f"{seed} {dtype} {number}")
        world = World(dtype, rng, tight=number % 20 == 7, checked=number % 25 == 0)
        for at in range(min(ROUNDS_PER_WORLD, ROUNDS - played)):
            try:
                world.play_round(bad_inputs=rng.random() < BAD_INPUT_SHARE)
            except Exception as error:
                where = f"seed={seed} dtype={dtype} world={number} round={at}"
                raise AssertionError(f"{where}: {error}") from error
        world.check_counts()
        tally += world.tally
        played += min(ROUNDS_PER_WORLD, ROUNDS - played)
    refused = {what: count for what, count in tally.items() if what.startswith("refused")}
    print(f"{played} rounds, {sum(refused.values())} wrong calls of {len(refused)} kinds")
    print(", ".join(f"{what} {tally[what]}" for what in PLAYED))
    print(", ".join(f"{reason} {tally[f'fallback: {reason}']}" for reason in FALLBACKS))
    if played >= ENOUGH_ROUNDS:
        assert all(tally[f"fallback: {reason}"] > 0 for reason in FALLBACKS), tally
        assert all(tally[what] > 0 for what in PLAYED), tally
        assert len(refused) >= 44, sorted(refused)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_one_changed_bit_is_noticed(dtype: str) -> None:
    rng = random.Random(5)
    world = World(dtype, rng)
    for _ in range(20):
        world.play_round(bad_inputs=False)
        layer = rng.randrange(len(world.memory))
        at = rng.randrange(len(world.memory[layer]))
        world.memory[layer][at] ^= 1 << rng.randrange(8)
        with pytest.raises(
            AssertionError, match=f"layer{layer} differs from the model at byte {at}"
        ):
            world.check_bytes("flipped")
        world.memory[layer][:] = world.model.caches[f"layer{layer}"].memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_models_float8_is_torchs_for_every_16_bit_float_in_range(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).float()
    values = values[values.abs() <= 448]  # beyond it torch gives NaN and the cache saturates
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (e4m3_codes(values.numpy()) == expected).all()
    beyond = np.array([449, 1e9, np.inf, -500, -np.inf, np.nan], dtype=np.float32)
    assert e4m3_codes(beyond).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F]
