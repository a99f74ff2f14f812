"""Failed drafting over views. Serving goes on, so counters and the log must tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from nwor_specpv import _C
from nwor_specpv.errors import NworError, logger

T = TypeVar("T")
_MOST_LOGGED = 8  # different texts: some have numbers in them


class RankError(NworError):
    """Drafting failed on one rank of several, as far as it can tell."""


class DraftFailures:
    """What went wrong with the drafts of one engine. Thread-safety: none."""

    def __init__(self, *, alone: bool) -> None:
        """`alone`: the engine has one rank."""
        self._alone = alone
        self.latest = ""  # its text; empty: nothing has failed
        self._logged: set[str] = set()

    def add(self, error: Exception, consequence: str, reason: str = "") -> None:
        """Counts `specpv_draft_failures_total{reason}` and logs what has not been logged before.

        Without a reason it follows from the error. Where there are other ranks, only what we have
        refused is taken as theirs, too. Anything else is raised: they may wait in the midst of the
        pass, and would take what this rank sends next for a part of it.
        """
        if isinstance(error, RankError):
            raise error  # it has been told
        _C.count_draft_failure(reason or _reason(error))
        self.latest = f"{type(error).__name__}: {error}"
        if self.latest not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(self.latest)
            logger.warning("nwor_specpv: %s: %s", consequence, self.latest, exc_info=error)
        if not self._alone and not isinstance(error, NworError):
            raise RankError(
                f"nwor_specpv: drafting over views failed on one of several ranks, which cannot go "
                f"on without the others: {self.latest}"
            ) from error

    def together(self, do: Callable[[], T]) -> T:
        """What `do` gives. Where it fails on one of several ranks, all raise NworError: none goes
        on alone, to wait for the others. REQUIRES: `do` itself speaks to no other rank."""
        if self._alone:
            return do()
        from vllm.distributed.parallel_state import get_world_group

        group, failed = get_world_group(), None
        try:
            found = do()
        except Exception as error:
            failed = error
        mine = f"rank {group.rank}: {type(failed).__name__}: {failed}" if failed else ""
        told = [""] * group.world_size
        torch.distributed.all_gather_object(told, mine, group=group.cpu_group)
        if any(told):
            raise NworError("; ".join(filter(None, told))) from failed
        return found


def _reason(error: Exception) -> str:
    if isinstance(error.__cause__ or error, torch.OutOfMemoryError | MemoryError):
        return "out_of_memory"
    return "refused" if isinstance(error, NworError) else "error"
