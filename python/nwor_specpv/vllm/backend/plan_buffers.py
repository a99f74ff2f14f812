"""Memory of a step's plan: its own for every shape that was captured, one piece for all others.

A graph finds its plan where it was captured. Steps outside of graphs may have any number of rows;
the next of them is planned behind the kernels of the last one on the same stream, so they share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class PlanBuffers:
    """Buffers of one builder. Thread-safety: none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[Hashable, torch.Tensor] = {}
        self._shared = self._make(0)

    def find(self, shape: Hashable, size: Callable[[], int], *, capture: bool) -> torch.Tensor:
        """The buffer of a step: `size()` bytes, which depend on `shape` alone."""
        known = self._captured.get(shape)
        if known is not None:
            return known
        num_bytes = size()
        if capture:
            made = self._captured[shape] = self._make(num_bytes)
            return made
        if self._shared.shape[0] < num_bytes:
            self._shared = self._make(0)  # lets go of it first
            self._shared = self._make(num_bytes)
        return self._shared[:num_bytes]

    def _make(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
