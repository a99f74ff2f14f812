"""A mean in which late observations count more than early ones."""

from __future__ import annotations

import math


class RunningMean:
    """Of a quantity per observation, or of successes per trial. Thread-safety: none.

    It starts with a `prior` of some `weight`. Before each observation, which weighs 1 or as many
    trials as it has, the weight of the past is multiplied by `decay` and cut to `most_past`.
    """

    def __init__(
        self,
        prior: float = 0.0,
        weight: float = 0.0,
        *,
        decay: float = 1.0,
        most_past: float = math.inf,
    ) -> None:
        self.value = prior
        self.count = 0  # observations
        self._weight, self._decay, self._most_past = weight, decay, most_past

    def add(self, amount: float, trials: float = 1.0) -> None:
        """An observation: an amount, or so many successes in so many trials."""
        past = min(self._most_past, self._decay * self._weight)
        self._weight = past + trials
        self.value = (past * self.value + amount) / self._weight
        self.count += 1
