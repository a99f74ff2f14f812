"""What became of commits on a GPU, learned without waiting for it."""

from __future__ import annotations

from typing import Any

import torch

from nwor_specpv import COMMIT_ERRORS
from nwor_specpv.errors import NworError


class CommitStatusReader:
    """Status words of commits on a GPU, read when they have arrived: nobody waits for them.

    A fault there means that emitted tokens are missing from the cache. By the time it is known the
    next step has used the staging, so all that is left is to say so and end.
    """

    def __init__(self) -> None:
        self._words: torch.Tensor | None = None
        self._status: torch.Tensor | None = None  # on its way; None: nothing is
        self._committed: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        self._aside: torch.cuda.Stream | None = None  # a copy would hold up the step's kernels

    def request(self, receipt: Any) -> None:
        """Sends for the status of this commit, after looking at the last one's."""
        self.check()
        if self._status is not None:  # the last one is still on its way: it is waited for here
            self._arrived.synchronize()
            self.check()
        if self._words is None:
            self._words = torch.zeros(8, dtype=torch.int64, pin_memory=True)
            self._committed, self._arrived = torch.cuda.Event(), torch.cuda.Event()
            self._aside = torch.cuda.Stream(receipt.status.device)
        self._status = receipt.status
        self._committed.record()
        with torch.cuda.stream(self._aside):
            self._committed.wait()
            self._words.copy_(self._status, non_blocking=True)
            self._arrived.record()

    def check(self) -> None:
        """Raises NworError if a commit that has been heard of went wrong."""
        if self._status is None or self._words is None or not self._arrived.query():
            return
        self._status = None
        code, request, index, value = self._words[:4].tolist()
        if code != 0:
            raise NworError(
                f"nwor_specpv: a commit failed on the GPU with {COMMIT_ERRORS[code]} (request "
                f"{request}, index {index}, value {value}), so accepted tokens are missing from "
                "the cache; restart the server and report this line"
            )
