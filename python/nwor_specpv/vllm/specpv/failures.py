"""Failed drafting over views. Serving goes on, so counters and the log must tell."""

from __future__ import annotations

import torch

from nwor_specpv import _C
from nwor_specpv.errors import NworError, logger

_MOST_LOGGED = 8  # different texts: some have numbers in them


class DraftFailures:
    """What went wrong with the drafts of one engine. Thread-safety: none."""

    def __init__(self) -> None:
        self.latest = ""  # its text; empty: nothing has failed
        self._logged: set[str] = set()

    def add(self, error: Exception, consequence: str, reason: str = "") -> None:
        """Counts `specpv_draft_failures_total{reason}` and logs what has not been logged before.

        Without a reason it follows from the error.
        """
        _C.count_draft_failure(reason or _reason(error))
        self.latest = f"{type(error).__name__}: {error}"
        if self.latest in self._logged or len(self._logged) == _MOST_LOGGED:
            return
        self._logged.add(self.latest)
        logger.warning("nwor_specpv: %s: %s", consequence, self.latest, exc_info=error)


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out_of_memory"
    return "refused" if isinstance(error, NworError) else "error"
