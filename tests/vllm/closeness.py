"""How close two runs of greedy requests are where numbers are rounded otherwise.

Kernels of another number of rows round otherwise, in bfloat16 visibly. So tokens may differ, but
only where two of them were all but equally likely, and log-probabilities are close up to there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Closeness:
    """Of requests that were compared up to their first other token."""

    total: int = 0  # tokens that both runs have
    differences: list[float] = field(default_factory=list)  # of log-probabilities of equal tokens
    gaps: list[float] = field(default_factory=list)  # between the two tokens where runs part

    @property
    def mean(self) -> float:
        return sum(self.differences) / max(1, len(self.differences))

    def __str__(self) -> str:
        gaps = ", ".join(f"{gap:.3f}" for gap in self.gaps)
        return (
            f"{len(self.differences)} of {self.total} tokens before the first other one; "
            f"log-probabilities differ by {self.mean:.5f} on average, "
            f"{max(self.differences, default=0):.5f} at most; gaps where they part: [{gaps}]"
        )

    def check(self, *, mean: float = 0.02, most: float = 0.3, share: float = 0.25) -> None:
        assert len(self.differences) > share * self.total, self
        assert self.mean < mean, self
        assert max(self.differences) < most, self
        assert max(self.gaps, default=0) < 2 * most, self


def compare(pairs: Iterable[tuple[Any, Any]]) -> Closeness:
    """Pairs of vLLM's outputs with log-probabilities, a few of them at each place."""
    found = Closeness()
    for wanted, got in pairs:
        length = min(len(wanted.token_ids), len(got.token_ids))
        found.total += length
        for i in range(length):
            tokens = wanted.token_ids[i], got.token_ids[i]
            if tokens[0] != tokens[1]:
                found.gaps.append(max(_gap(side.logprobs[i], *tokens) for side in (wanted, got)))
                break
            one, other = (side.logprobs[i][tokens[0]].logprob for side in (wanted, got))
            found.differences.append(abs(one - other))
    return found


def _gap(logprobs: Any, one: int, other: int) -> float:
    """Between two tokens of one run; infinite if one of them is not even among the likeliest."""
    if one not in logprobs or other not in logprobs:
        return math.inf
    return abs(logprobs[one].logprob - logprobs[other].logprob)
