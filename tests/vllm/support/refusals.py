"""Commits that fail: on a CPU at once, or as on a GPU, where the next step is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class FailingCommits:
    """An interceptor some of whose commits of accepted drafts (1, 2, ..) raise."""

    def __init__(self, interceptor: Any, calls: set[int]) -> None:
        self.calls = calls
        self.num_commits = self.num_failed = 0
        self._interceptor = interceptor

    def commit(self, path: Any, counts: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if counts.any():
            self.num_commits += 1
            if self.num_commits in self.calls:
                self.num_failed += 1
                return self._fail()
        return self._interceptor.commit(path, counts, *args, **kwargs)

    def _fail(self) -> Any:
        raise RuntimeError("injected")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interceptor, name)


class RefusingCommits(FailingCommits):
    """Nothing is written; the receipt has the status words that a GPU would have written."""

    code = "slot_range"

    def _fail(self) -> Any:
        from nwor_specpv import COMMIT_ERRORS

        self._interceptor.abort()
        status = torch.zeros(8, dtype=torch.int64)
        status[0] = COMMIT_ERRORS.index(self.code)
        return SimpleNamespace(status=status)


def fail_commits(engine: Any, calls: set[int]) -> FailingCommits:
    """REQUIRES: the engine has run."""
    engine.staging.interceptor = FailingCommits(engine.staging.interceptor, calls)
    return engine.staging.interceptor


def refuse_commits(engine: Any, calls: set[int]) -> RefusingCommits:
    """Has the engine work as on a GPU, some of whose commits are refused. REQUIRES: as above."""
    engine.steps._learns_late = lambda _: True
    engine.staging.interceptor = RefusingCommits(engine.staging.interceptor, calls)
    return engine.staging.interceptor
