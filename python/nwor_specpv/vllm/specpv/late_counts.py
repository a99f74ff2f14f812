"""Counts that are made on the device and read a little later: nobody waits for them."""

from __future__ import annotations

import torch


class LateCounts:
    """`counts` [size] int64 grows on the device; `read` says by how much since the last time.

    Thread-safety: none.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        self._reported = [0] * size
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def read(self, *, send: bool = True) -> list[int] | None:
        """What has arrived, or None. With `send` the counts of now are sent for, unless some are
        on their way."""
        if not self.counts.is_cuda:
            return self._since(self.counts.tolist())
        found = None
        if self._pending is not None and self._pending[1].query():
            found = self._since(self._pending[0].tolist())
            self._pending = None
        if self._pending is None and send:
            host = torch.empty_like(self.counts, device="cpu", pin_memory=True)
            host.copy_(self.counts, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._pending = (host, arrived)
        return found

    def _since(self, now: list[int]) -> list[int]:
        new = [after - before for after, before in zip(now, self._reported, strict=True)]
        self._reported = now
        return new
