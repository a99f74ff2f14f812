"""Failed drafting over views. Serving goes on, so counters and the log must tell.

Tensor-parallel ranks run passes together or not at all, and all of them propose the same drafts.
The rule for whoever drafts:

* What a rank does alone, without collectives, it does in a block of `agreed`: when one rank fails
  there, all of them give up, each of which counts a failure.
* Our part of a pass, in the midst of the model's collectives, keeps its failure until the pass is
  over (`PartialPass.keeps_failure`), so that no rank waits for another.
* What else fails between two agreements, the model itself or, in a head's proposals without graphs,
  what we do between its passes, cannot be agreed upon: the other ranks may wait in the midst of
  the pass, and would take what this rank sends next for a part of it. The worker ends, as with an
  error in a step of vLLM's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from nwor_specpv import _C
from nwor_specpv.errors import NworError, logger

_MEMORY = "out_of_memory"
_MOST_LOGGED = 8  # different texts: some have numbers in them


class RankError(NworError):
    """Drafting failed on one rank of several, as far as it can tell."""


class OtherRankError(NworError):
    """Another rank has failed, and all of them have agreed to give up."""


class DraftFailures:
    """What went wrong with the drafts of one engine. Thread-safety: none."""

    def __init__(self, *, single_rank: bool) -> None:
        """`single_rank`: the engine has no other ranks."""
        self.single_rank = single_rank
        self.latest = ""  # its text; empty: nothing has failed
        self._logged: set[str] = set()
        self._agreed: Exception | None = None  # the latest that all ranks know of

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A block that all ranks come through, or all of them raise: their own error, or
        `OtherRankError`. REQUIRES: nothing in it waits for another rank, all ranks enter it."""
        if self.single_rank:
            yield
            return
        try:
            yield
        except Exception as error:
            _anyone(failed=True)
            self._agreed = error
            raise
        if _anyone(failed=False):
            self._agreed = OtherRankError("another rank has failed; its log says why")
            raise self._agreed

    def add(self, error: Exception, consequence: str, reason: str = "") -> None:
        """Counts `specpv_draft_failures_total{reason}` and logs what has not been logged before.

        Without a reason, and where memory is missing, it follows from the error. Where there are
        other ranks, all of them must have agreed on it, or we have refused something: they refuse
        it, too, at the same place. Anything else is raised.
        """
        if isinstance(error, RankError):
            raise error  # it has been told
        known, self._agreed = error is self._agreed or isinstance(error, NworError), None
        found = _reason(error)
        _C.count_draft_failure(found if found == _MEMORY else reason or found)
        self.latest = f"{type(error).__name__}: {error}"
        if self.latest not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(self.latest)
            logger.warning("nwor_specpv: %s: %s", consequence, self.latest, exc_info=error)
        if not self.single_rank and not known:
            raise RankError(
                "nwor_specpv: drafting over views failed on one of several ranks, which cannot go "
                f"on without the others; restart the server: {self.latest}"
            ) from error


def _anyone(*, failed: bool) -> bool:
    """Whether a rank has failed. Over the CPU's group: the device is not waited for."""
    from vllm.distributed.parallel_state import get_tp_group

    told = torch.tensor([failed], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(
        told, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().cpu_group
    )
    return bool(told.item())


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return _MEMORY
    refused = isinstance(error, NworError) and not isinstance(error, OtherRankError)
    return "refused" if refused else "error"
