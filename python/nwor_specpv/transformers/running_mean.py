"""A mean of the latest values above all."""

from __future__ import annotations


class RunningMean:
    """The first values count alike; then `keep` is the weight of the past."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        keep = min(self._keep, self.count / (self.count + 1))
        self.value = keep * self.value + (1 - keep) * value
        self.count += 1
