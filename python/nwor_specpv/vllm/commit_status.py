"""What became of commits on a GPU, learned in the next step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nwor_specpv import COMMIT_ERRORS


class RefusedCommit(NamedTuple):
    reason: str  # one of COMMIT_ERRORS
    problem: str  # a sentence for the log


class CommitStatusReader:
    """Status words of a step's commits, which the next step reads before its tokens are known.

    By then the next step has used the staging: what a refused commit should have written is gone.
    """

    def __init__(self) -> None:
        self._words: list[torch.Tensor] = []  # on the host, one for each commit of a step
        self._sent: list[Any] = []  # receipts whose statuses are on their way
        self._committed: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        self._aside: torch.cuda.Stream | None = None  # a copy would hold up the step's kernels

    def send(self, receipts: list[Any]) -> None:
        """Sends for the statuses of a step's commits. REQUIRES: the last ones were read."""
        on_gpu = receipts[0].status.is_cuda
        while len(self._words) < len(receipts):
            self._words.append(torch.zeros(8, dtype=torch.int64, pin_memory=on_gpu))
        self._sent = receipts
        if not on_gpu:
            self._copy()
            return
        if self._aside is None:
            self._committed, self._arrived = torch.cuda.Event(), torch.cuda.Event()
            self._aside = torch.cuda.Stream(receipts[0].status.device)
        self._committed.record()
        with torch.cuda.stream(self._aside):
            self._committed.wait()
            self._copy()
            self._arrived.record()

    def _copy(self) -> None:
        for words, receipt in zip(self._words, self._sent, strict=False):
            words.copy_(receipt.status, non_blocking=True)

    def read(self) -> RefusedCommit | None:
        """Waits for what was sent for: the first commit that was refused, if one was."""
        if self._sent and self._arrived is not None:
            self._arrived.synchronize()
        sent, self._sent = self._sent, []
        for words in self._words[: len(sent)]:
            code, request, index, value = words[:4].tolist()
            if code != 0:
                reason = COMMIT_ERRORS[code]
                return RefusedCommit(
                    reason,
                    f"a commit was refused with {reason} (request {request}, index {index}, value "
                    f"{value}), so accepted tokens are missing from the cache",
                )
        return None
