"""Calls that wait at the same time, in one forward pass."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from nwor_specpv.errors import UnknownSessionError

from .codes import WorkerStoppingError

if TYPE_CHECKING:
    from nwor_specpv import SessionStore, VerifyRequest, VerifyResult

logger = logging.getLogger("nwor_specpv")

# A store runs longer prompts in several passes; who shares a batch with one would wait for all.
_LONG_PROMPT = 256
_STOPPING = "the worker is stopping"
_ENDED = "the worker runs no more calls, its log has more"


class Ticket:
    """One verify that waits for its turn. Thread-safe."""

    def __init__(
        self, request: VerifyRequest, session: str, prefix_len: int, num_new_tokens: int
    ) -> None:
        self.request, self.session, self.prefix_len = request, session, prefix_len
        self.is_long = num_new_tokens > _LONG_PROMPT
        self.abandoned = False
        self._settled = threading.Event()
        self._result: VerifyResult | None = None
        self._error: BaseException | None = None

    def abandon(self) -> None:
        """Nobody waits for it any more: it is left out if its turn has not come."""
        self.abandoned = True
        self._settled.set()

    def settle(
        self, result: VerifyResult | None = None, error: BaseException | None = None
    ) -> None:
        """The first time counts."""
        if not self._settled.is_set():
            self._result, self._error = result, error
            self._settled.set()

    def wait(self) -> VerifyResult | None:
        """The result; None when it was abandoned first."""
        self._settled.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Batches:
    """One thread that takes what is waiting. Only it runs the model; it also sweeps when idle."""

    def __init__(
        self, store: SessionStore, max_batch: int = 64, sweep_seconds: float | None = None
    ) -> None:
        self._store, self._max_batch, self._sweep_seconds = store, max_batch, sweep_seconds
        if sweep_seconds is not None:
            self._sweep_seconds = min(sweep_seconds, threading.TIMEOUT_MAX)
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []  # in the order they came
        self._closed = ""  # why
        self._thread = threading.Thread(target=self._run, name="nwor-worker", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(not ticket.abandoned for ticket in self._waiting)

    @property
    def closed(self) -> str:
        """Why no more calls are run; empty as long as they are."""
        return self._closed

    def submit(self, ticket: Ticket) -> None:
        with self._changed:
            if self._closed:
                raise WorkerStoppingError(self._closed)
            self._waiting.append(ticket)
            self._changed.notify()

    def close(self) -> None:
        """What runs ends first; what waits is refused."""
        for ticket in self._refuse(_STOPPING):
            ticket.settle(error=WorkerStoppingError(_STOPPING))
        self._thread.join()

    def _refuse(self, reason: str) -> list[Ticket]:
        """All later calls; those that wait are the caller's to settle."""
        with self._changed:
            self._closed = self._closed or reason
            refused, self._waiting = self._waiting, []
            self._changed.notify()
        return refused

    def _run(self) -> None:
        batch: list[Ticket] | None = []
        try:
            while (batch := self._take()) is not None:
                if batch:
                    self._verify(batch)
                else:
                    self._sweep()
        except BaseException as error:  # whoever waits would wait for ever
            logger.exception("worker: no more calls are run, it has to be started again")
            for ticket in [*(batch or []), *self._refuse(_ENDED)]:
                ticket.settle(error=error)

    def _take(self) -> list[Ticket] | None:
        """The next batch; an empty one when it is time to sweep, None at the end."""
        with self._changed:
            while not self._closed:
                if batch := self._pick():
                    return batch
                if not self._changed.wait(self._sweep_seconds):
                    return []
        return None

    def _pick(self) -> list[Ticket]:
        """As many as go together: of different sessions, and all with long prompts or none."""
        waiting = [ticket for ticket in self._waiting if not ticket.abandoned]
        batch: list[Ticket] = []
        sessions: set[str] = set()
        for ticket in waiting:
            fits = len(batch) < self._max_batch and ticket.is_long == waiting[0].is_long
            if fits and ticket.session not in sessions:
                batch.append(ticket)
            sessions.add(ticket.session)  # what came later of a session stays behind
        taken = set(map(id, batch))
        self._waiting = [ticket for ticket in waiting if id(ticket) not in taken]
        return batch

    def _verify(self, batch: list[Ticket]) -> None:
        # Asked alone, one that is refused costs the others nothing and is counted once.
        together = []
        for ticket in batch:
            if self._is_doubtful(ticket):
                self._verify_together([ticket])
            else:
                together.append(ticket)
        self._verify_together(together)

    def _is_doubtful(self, ticket: Ticket) -> bool:
        try:
            return self._store.info(ticket.session).length != ticket.prefix_len
        except UnknownSessionError:
            return ticket.prefix_len != 0
        except Exception:
            return True

    def _verify_together(self, batch: list[Ticket]) -> None:
        """A batch fails as a whole and changes nothing: halves of it find out whose fault it is."""
        batch = [ticket for ticket in batch if not ticket.abandoned]
        if not batch:
            return
        try:
            results = self._store.verify_batch([ticket.request for ticket in batch])
        except BaseException as error:  # a thread that ended would leave all later calls waiting
            if len(batch) == 1:
                batch[0].settle(error=error)
                return
            middle = len(batch) // 2
            self._verify_together(batch[:middle])
            self._verify_together(batch[middle:])
            return
        for ticket, result in zip(batch, results, strict=True):
            ticket.settle(result)

    def _sweep(self) -> None:
        try:
            self._store.sweep()
        except Exception:
            logger.exception("worker: idle sessions cannot be taken away")
