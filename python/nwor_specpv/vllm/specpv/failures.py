"""Failed drafting over views, counted by reason: serving goes on, so the counters must tell."""

from __future__ import annotations

import torch

from nwor_specpv import _C
from nwor_specpv.errors import NworError


def count_failure(error: Exception, reason: str = "") -> None:
    """`specpv_draft_failures_total{reason}`; without a reason it follows from the error."""
    if not reason:
        memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        refused = isinstance(error, NworError)
        reason = "out_of_memory" if memory else "refused" if refused else "error"
    _C.count_draft_failure(reason)
