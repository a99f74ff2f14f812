"""Whether two samples, or a sample and a distribution, may be of one kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

_RARE = 12  # observations that a kind has in both samples together, at least


def quantile(degrees: int, deviations: float = 3.09) -> float:
    """Of chi-square, by Wilson and Hilferty. Deviations: 3.09 is 99.9 %, 3.72 is 99.99 %."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + deviations * part**0.5) ** 3


def two_samples(one: Sequence[Hashable], other: Sequence[Hashable]) -> tuple[float, int]:
    """The statistic of two samples of one size, and its degrees of freedom.

    What is rare is one kind.
    """
    assert len(one) == len(other)
    counts = Counter(one), Counter(other)
    kinds = [k for k in counts[0] | counts[1] if counts[0][k] + counts[1][k] >= _RARE]
    pairs = [(counts[0][kind], counts[1][kind]) for kind in kinds]
    rest = [len(one) - sum(pair[side] for pair in pairs) for side in (0, 1)]
    if sum(rest) >= _RARE:
        pairs.append((rest[0], rest[1]))
    # Each pair is expected to be equal.
    return sum((a - b) ** 2 / (a + b) for a, b in pairs), len(pairs) - 1
