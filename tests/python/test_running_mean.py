"""The running mean of both hosts, against the formulas that each of them goes by."""

from __future__ import annotations

import os
import random

import pytest

from nwor_specpv.running_mean import RunningMean
from nwor_specpv.vllm.specpv.policy import running_mean

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))


def test_the_first_values_count_alike_and_then_the_past_has_a_fixed_share() -> None:
    print(f"seed={SEED}")
    rng, keep = random.Random(SEED), 0.7
    mean, expected = RunningMean(most_past=keep / (1 - keep)), 0.0
    for count in range(50):
        value = rng.uniform(-5, 5)
        mean.add(value)
        share = min(keep, count / (count + 1))
        expected = share * expected + (1 - share) * value
        assert mean.value == pytest.approx(expected)
        assert mean.count == count + 1


def test_successes_and_trials_decay_alike() -> None:
    print(f"seed={SEED}")
    rng, mean = random.Random(SEED), running_mean(0.9)
    assert mean.value == 0.9
    successes, trials = 0.9 * 8, 8.0
    for _ in range(50):
        more = rng.randrange(1, 9)
        right = rng.randint(0, more)
        mean.add(right, more)
        successes, trials = 0.98 * successes + right, 0.98 * trials + more
        assert mean.value == pytest.approx(successes / trials)
    for _ in range(1000):
        mean.add(1, 2)
    assert mean.value == pytest.approx(0.5, abs=0.01), "it forgets"
