"""Which of our kernels a test launches, and the fewest tests that launch them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHECK = "launches"  # the check that asks
OURS = "nwor::"


class Profile:
    """torch's profiler around one test. Names have all template arguments: every instantiation
    of a kernel counts as one. Replayed graphs are seen, too."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profile: Any = profile(activities=[ProfilerActivity.CUDA])
        self._profile.__enter__()

    def names(self) -> list[str]:
        """Ends it."""
        self._profile.__exit__(None, None, None)
        events = self._profile.profiler.kineto_results.events()
        return sorted({event.name() for event in events if OURS in event.name()})


def function_of(test: str) -> str:
    """The test without its parameters."""
    return test.partition("[")[0]


def chosen(launched: Mapping[str, list[int]], seconds: Mapping[str, float]) -> list[str]:
    """Tests that launch, together, whatever any of them does.

    Of every function that launches something the quickest parameters, as functions differ in what
    they hand to a kernel; then, while an instantiation is left, the test with most of those left.
    """
    quickest: dict[str, str] = {}
    for test in sorted(launched, key=lambda test: (seconds.get(test, 0.0), test)):
        if launched[test]:
            quickest.setdefault(function_of(test), test)
    found = list(quickest.values())
    left = {kernel for kernels in launched.values() for kernel in kernels}
    left.difference_update(*(launched[test] for test in found))
    while left:
        best = max(launched, key=lambda test: (len(left & set(launched[test])), test))
        found.append(best)
        left.difference_update(launched[best])
    return sorted(found)
