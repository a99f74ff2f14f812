"""The round of each step: opened with its metadata, written by layers, committed or given up.

A step is: `begin` when the attention metadata is built, `write` per layer as the model runs,
`finish` when the runner knows what was accepted. Steps end in `finish` or are aborted by the next
`begin` (an exception in the model, a request that vanished, a graph capture).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nwor_specpv import Interceptor, RoundPlan
from nwor_specpv.errors import NworError, logger

from . import draft_rows
from .backend.caches import views_of, write_direct
from .commit_status import CommitStatusReader
from .faults import Faults
from .staging import Staging

# Path entries that one commit may have (see docs/commit.md).
MAX_COMMIT_ENTRIES = 8192


@dataclass
class OpenStep:
    """An open round and what the commit needs to know of it."""

    interceptor: Interceptor
    plan: RoundPlan
    staged: bool
    capture: bool
    num_drafts: torch.Tensor  # [B] int32 on the caches' device
    path: torch.Tensor  # [B, depth] int32: rows of the request, the first that may be accepted on
    places: torch.Tensor | None = None  # see TreePaths; None: every row goes to its own slot
    joined: set[int] = field(default_factory=set)  # groups whose metadata was built
    slots: dict[int, torch.Tensor] = field(default_factory=dict)  # by group, [T]
    num_writes: int = 0  # layers written by Python, none when a graph was replayed
    layers: set[str] = field(default_factory=set)  # of those, the ones that staged their rows
    may_defer: bool = False  # nothing reads the step's rows from the cache


@dataclass(frozen=True)
class TreePaths:
    """Accepted rows of draft trees. Slots were given to rows as if drafts were chains."""

    path: torch.Tensor  # [B, depth] int32: rows of the request, -1 padded
    places: torch.Tensor  # [B, depth] int64: rows of the batch whose slots they go to


class Steps:
    """The steps of one engine. Thread-safety: none; a vLLM worker runs them from one thread."""

    def __init__(self, staging: Staging, faults: Faults) -> None:
        self.num_replays = 0  # steps whose writes a CUDA graph did
        self._staging = staging
        self._faults = faults
        self._step: OpenStep | None = None
        self._rows: tuple[Any, torch.Tensor, torch.Tensor] | None = None  # of the last step
        self._statuses = CommitStatusReader()

    # ---- opening and writing --------------------------------------------------------------------

    def begin(
        self,
        group: int,
        lens: list[int],
        drafts: list[int],
        slot_mapping: torch.Tensor,
        capture: bool = False,
        may_defer: bool = False,
        trees: bool = False,
    ) -> None:
        """Opens the round of a step, or joins it where the engine has several cache groups.

        With `capture` the step is only recorded into a CUDA graph; the next one ends it. With
        `may_defer` no row of the step is read from the cache, so layers may write late. With
        `trees` drafts are trees, and `finish` is told which rows were accepted.

        A step of single rows without drafts has no round: vLLM writes them itself, as fast as ever.
        """
        step = self._step
        if (
            step is not None
            and group not in step.joined
            and step.capture is capture
            and lens == list(step.plan.query_lens)
        ):
            step.joined.add(group)
            step.slots[group] = slot_mapping
            return
        self.abort()
        if self._staging.writes_single_rows(lens, drafts):
            return
        self._faults.note_step(drafts)
        interceptor = self._staging.bind(slot_mapping.device)
        if self._staging.checker is not None and not capture:
            self._staging.checker.snapshot()
        plan = RoundPlan(lens, drafts, ascending=trees and any(drafts))
        staged = interceptor.begin(plan, capture).stage
        counts, path = self._rows_on_device(lens, drafts, slot_mapping.device)
        self._step = OpenStep(
            interceptor,
            plan,
            staged,
            capture,
            counts,
            path,
            joined={group},
            slots={group: slot_mapping},
            may_defer=may_defer and self._staging.checker is None,
        )

    def _rows_on_device(
        self, lens: list[int], drafts: list[int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of drafts and their rows; steps like the last one share what it had."""
        key = (lens, drafts, device)
        if self._rows is None or self._rows[0] != key:
            self._rows = (key, *_on_device(*draft_rows.draft_path(lens, drafts), device))
        return self._rows[1:]

    def write(
        self,
        layer: str,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        defer: bool = False,
    ) -> bool:
        """Routes one layer's rows; False: the caller writes them itself.

        With `defer` the layer's attention does the write (`merge_and_write_rows`), where it may.
        """
        step = self._step
        if step is None or layer not in self._staging.bound:
            return False
        step.num_writes += 1
        num_rows = slot_mapping.shape[0]
        outcome = step.interceptor.write(
            layer, key[:num_rows], value[:num_rows], slot_mapping, defer=defer and step.may_defer
        )
        if outcome.action == "stage":
            step.layers.add(layer)
        return outcome.action != "bypass" or outcome.reason == "stale_round"

    @property
    def stages(self) -> bool:
        """Whether the drafts of the open step are staged."""
        return self._step is not None and self._step.staged

    # ---- ending ---------------------------------------------------------------------------------

    def finish(
        self,
        accepted: Callable[[torch.Tensor], torch.Tensor],
        paths: TreePaths | None = None,
    ) -> None:
        """Commits what was accepted. `accepted` gives the counts [B] for the numbers of drafts;
        `paths`: which rows these are, where drafts are trees.

        What became of the last step's commits is known here, before this step's tokens are.
        """
        self._settle_last()
        step, self._step = self._step, None
        if step is None:
            return
        if paths is not None:
            step.path, step.places = paths.path, paths.places
        checker = self._staging.checker
        if step.capture:
            step.interceptor.abort()
            return
        if not step.staged and checker is None:
            self._close(step)
            return
        counts = accepted(step.num_drafts)
        if counts.shape != step.num_drafts.shape:
            step.interceptor.abort()
            raise NworError(
                f"accepted tokens: the step has {step.num_drafts.shape[0]} requests, but there are "
                f"counts of {counts.shape[0]}"
            )
        if checker is not None:
            self._staging.note(checker.verify_staged())
        try:
            self._note_replay(step)
        except NworError:  # rows that no graph has staged cannot be written one by one either
            step.interceptor.abort()
            raise
        try:
            receipts = self._commit(step, counts)
        except Exception as error:
            logger.exception("nwor_specpv: the commit failed; writing accepted rows one by one")
            try:
                self._rescue(step, counts, f"{type(error).__name__}: {error}", "error")
            finally:
                step.interceptor.abort()
            return
        self._learn(step, counts, receipts)
        if checker is not None and receipts[-1].ok:
            self._staging.note(checker.verify(receipts[-1], counts.tolist()))

    def abort(self) -> None:
        """Gives up the open step, if there is one: nothing of its drafts is written."""
        step, self._step = self._step, None
        if step is not None:
            step.interceptor.abort()

    def _learn(self, step: OpenStep, counts: torch.Tensor, receipts: list[Any]) -> None:
        """Finds out what became of the step's commits, or has the next step find it out."""
        if self._learns_late(counts):
            self._statuses.send(receipts)
        elif not receipts[-1].ok:
            self._end_refused(step, counts, receipts[-1])

    def _learns_late(self, counts: torch.Tensor) -> bool:
        """Whether a commit's outcome is known in the next step only: nobody waits for a GPU."""
        return counts.is_cuda and self._staging.checker is None

    def _settle_last(self) -> None:
        """Reads what became of the last step's commits."""
        refused = self._statuses.read()
        if refused is not None:
            self._lose(self._staging.interceptor, *refused)

    def _lose(self, interceptor: Interceptor | None, reason: str, problem: str) -> None:
        """Accepted tokens are not in the cache."""
        if interceptor is not None:
            interceptor.report_bypass("commit_lost", problem)
        self._faults.lose(reason, problem)

    def _end_refused(self, step: OpenStep, counts: torch.Tensor, receipt: Any) -> None:
        """Ends a step one of whose commits wrote nothing."""
        reason = receipt.verdict.error
        try:
            if reason == "rank_disagreement":  # each rank would write its own rows
                problem = (
                    "tensor-parallel ranks accepted different tokens, so none of them may write"
                )
                self._lose(step.interceptor, reason, problem)
                return
            self._rescue(step, counts, receipt.problem, reason)
        finally:
            if step.interceptor.stats()["round_open"]:  # further chunks were to follow
                step.interceptor.abort()

    def _close(self, step: OpenStep) -> None:
        """Ends a step that staged nothing: all its rows are in the cache, of this rank."""
        try:
            self._note_replay(step)
            receipt = step.interceptor.commit(step.path, step.num_drafts)
        except Exception:
            logger.exception(
                "nwor_specpv: could not close a step without staged drafts; serving on"
            )
            step.interceptor.abort()
            return
        if self._staging.agrees:
            self._learn(step, step.num_drafts, [receipt])

    def _note_replay(self, step: OpenStep) -> None:
        """Tells the interceptor of writes that a CUDA graph did: no layer has called us."""
        if step.num_writes == 0 and step.num_drafts.is_cuda:
            step.interceptor.note_replay()
            self.num_replays += 1

    def _commit(self, step: OpenStep, counts: torch.Tensor) -> list[Any]:
        """Receipts of the step's chunks. Where nobody has to wait to know it, none follows one that
        is not ok.
        """
        depth = step.path.shape[1]
        chunks = draft_rows.chunk_depths(len(step.plan.query_lens), depth, MAX_COMMIT_ENTRIES)
        slots = None
        if step.places is not None:
            slots = [step.slots[group][step.places] for group in sorted(step.slots)]
        if len(chunks) == 1:  # every launch here is felt in a short step
            return [step.interceptor.commit(step.path, counts, slots, rows="request")]
        known = not counts.is_cuda or self._staging.checker is not None
        receipts = []
        for begin, end in chunks:
            part = (counts - begin).clamp(0, end - begin)
            columns = slice(begin, end)
            receipt = step.interceptor.commit(
                step.path[:, columns].contiguous(),
                part,
                slots and [one[:, columns].contiguous() for one in slots],
                rows="request",
                last=end == depth,
            )
            receipts.append(receipt)
            if known and not receipt.ok:
                break
        return receipts

    def _rescue(self, step: OpenStep, counts: torch.Tensor, problem: str, reason: str) -> None:
        """Writes the accepted rows from staging, which a failed commit leaves as it was.

        If that fails too, requests are computed again: a token that was emitted must not be missing
        from the cache.
        """
        if not step.staged:
            return
        if self._staging.agrees and reason != "write_failed":  # the other ranks wrote nothing
            self._lose(step.interceptor, reason, problem)
            return
        logger.error("nwor_specpv: accepted rows are written one by one: %s", problem)
        try:
            self._write_accepted(step, counts)
        except Exception as error:
            self._lose(step.interceptor, reason, f"{problem}; {type(error).__name__}: {error}")
            return
        step.interceptor.report_bypass("commit_failure", problem)
        self._faults.stop(reason, problem)

    def _write_accepted(self, step: OpenStep, counts: torch.Tensor) -> None:
        path = draft_rows.accepted_path(step.path, counts)
        starts = torch.tensor([0, *step.plan.query_lens], device=path.device).cumsum(0)[:-1]
        batch_rows = (path + starts[:, None])[path >= 0].long()
        places = batch_rows if step.places is None else step.places[path >= 0]
        stage_rows = torch.tensor(step.interceptor.stage_rows(), device=path.device)
        chosen = stage_rows[batch_rows].long()
        for group, slots in step.slots.items():
            keys, values = step.interceptor.staged(group)
            destinations = slots[places]
            for layer, name in enumerate(self._staging.groups[group]):
                if step.num_writes and name not in step.layers:
                    continue  # staging has rows of an earlier step; what it wrote is in its cache
                caches, scales = views_of(self._staging.layers[name])
                chosen_rows = keys[layer][chosen], values[layer][chosen]
                write_direct(caches, *chosen_rows, destinations, *scales)


def _on_device(
    counts: list[int], path: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of drafts [B] and their rows [B, depth] on the device: one copy, no waiting."""
    flat = counts + [row for request in path for row in request]
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
    both = host.to(device, non_blocking=True)
    depth = len(path[0]) if path else 1
    return both[: len(counts)], both[len(counts) :].view(len(counts), depth)
