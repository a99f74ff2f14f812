"""What each request of mode `refresh` does in a step, decided by the library's policy.

A `PartialCache` keeps each request's state. vLLM says how long a context is before each step, with
asynchronous scheduling at most, and never what a step has accepted, so lengths are reached
(`PartialCache.reach`) and steps finished when they are decided (`finish_later`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nwor_specpv import _C, PartialCache, VerifyPolicy

from .views import ViewStore


@dataclass
class RefreshRequest:
    """A request of the batch."""

    cache: PartialCache
    row: int | None = None  # in the store of views


@dataclass(frozen=True)
class RefreshDecision:
    """What one request does in a step."""

    row: int = -1
    partial: bool = False
    select: bool = False
    probe: bool = False  # its old view is compared with full attention
    trigger: str = "none"  # why it is full; of FULL_TRIGGERS


class RefreshRequests:
    """The requests of one engine. Thread-safety: none."""

    def __init__(self, store: ViewStore, max_rows: int, bytes_per_token: int) -> None:
        """`max_rows`: of a request in a step. `bytes_per_token`: of K and V over all layers."""
        self._store, self._max_rows = store, max_rows
        self.bytes_per_token = bytes_per_token
        self._policy = VerifyPolicy(store.config)
        self._known: dict[str, RefreshRequest] = {}
        self._selecting: list[RefreshRequest] = []  # in the step that is open

    @property
    def selects(self) -> bool:
        """Whether a request of the open step selects blocks."""
        return bool(self._selecting)

    def decide(
        self,
        names: Sequence[str],
        contexts: Sequence[int],
        lens: Sequence[int],
        drafts: Sequence[int],
        prefilling: Sequence[bool],
        count: int | None = None,
    ) -> list[RefreshDecision]:
        """Opens a step and counts it. `contexts`: tokens before a request's rows, at most.

        Of more than `count` requests those behind see their whole context, whatever they have. A
        view of theirs is still good for their next step: the tail has what comes now.
        """
        self._forget(set(names))
        batch = zip(names, contexts, lens, drafts, prefilling, strict=True)
        front = len(names) if count is None else count
        return [
            self._decide(*request, in_front=place < front) for place, request in enumerate(batch)
        ]

    def end(self) -> None:
        """The open step has ended, and what was selected in it stands."""
        self._selecting = []

    def give_up(self, trigger: str = "first") -> None:
        """Nothing was selected in the open step: whoever wanted to has no view.

        `trigger`: why its next step is full, of FULL_TRIGGERS.
        """
        for request in self._selecting:
            request.cache.require_full(trigger)
        self._selecting = []

    def _decide(
        self,
        name: str,
        context: int,
        rows: int,
        drafts: int,
        prefilling: bool,
        *,
        in_front: bool,
    ) -> RefreshDecision:
        """`prefilling`: its rows are of a prompt, or computed again; a piece of either may be one
        row, as a verify step without drafts is."""
        request = self._known.get(name)
        if request is None:
            request = self._known[name] = RefreshRequest(self._new_cache())
        cache = request.cache
        if prefilling or rows != 1 + drafts:
            cache.restart(context)
            self._count_prompt(context)
            return RefreshDecision(trigger="short_context")
        cache.reach(context)
        viewable = in_front and (request.row is not None or self._store.has_room)
        decision = self._policy.decide(cache, rows, viewable)
        had_view = cache.selected and cache.required == "none"
        in_reach = cache.tail_len <= cache.budget.tail_capacity
        cache.finish_later(decision)
        if decision.kind == "full":
            return RefreshDecision(trigger=decision.trigger)
        if request.row is None:
            request.row = self._store.open()
        assert request.row is not None
        if decision.kind == "partial":
            return RefreshDecision(request.row, partial=True)
        self._selecting.append(request)
        probe = had_view and in_reach
        return RefreshDecision(request.row, select=True, probe=probe, trigger=decision.trigger)

    def _new_cache(self) -> PartialCache:
        cache = PartialCache(self._store.config, self._max_rows)
        cache.set_bytes_per_token(self.bytes_per_token)
        return cache

    def _count_prompt(self, context: int) -> None:
        """Rows that verify nothing; they read their whole context."""
        _C.count_full_steps("short_context", 1)
        for metric in ("specpv_kv_bytes_full_total", "specpv_kv_bytes_read_total"):
            _C.count(metric, context * self.bytes_per_token)

    def _forget(self, names: set[str]) -> None:
        for name in [name for name in self._known if name not in names]:
            row = self._known.pop(name).row
            if row is not None:
                self._store.close(row)
