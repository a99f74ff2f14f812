"""Runs calls that wait at the same time in one forward pass."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from nwor_specpv.errors import UnknownSessionError

from .status_codes import WorkerStoppingError

if TYPE_CHECKING:
    from nwor_specpv import SessionStore, VerifyRequest, VerifyResult

    from .judging import Judge, Sampling

logger = logging.getLogger("nwor_specpv")

# A store runs longer prompts in several passes; calls in the same batch would wait for all.
_LONG_PROMPT = 256
_STOPPING = "the worker is stopping; send the whole sequence to another one"
_CUT_SHORT = "the worker stopped before the pass of this call ended"
_ENDED = "the worker no longer runs calls; its log has more"


class PendingCall:
    """A verify that waits for its turn. Thread-safe."""

    def __init__(
        self,
        request: VerifyRequest,
        session: str,
        prefix_len: int,
        num_new_tokens: int,
        sampling: Sampling | None = None,
    ) -> None:
        self.request, self.session, self.prefix_len = request, session, prefix_len
        self.sampling = sampling  # None: greedy
        self.wait_seconds = self.run_seconds = 0.0  # of a call that has ended
        self._came, self._began = time.monotonic(), 0.0
        self.is_long = num_new_tokens > _LONG_PROMPT
        self.abandoned = False
        self._settled = threading.Event()
        self._result: VerifyResult | None = None
        self._error: BaseException | None = None

    def abandon(self) -> None:
        """Called when the client has gone: the call is skipped if its turn has not come."""
        self.abandoned = True
        self._settled.set()

    def begin(self) -> None:
        """Called when its turn has come; later calls change nothing."""
        self._began = self._began or time.monotonic()

    def settle(
        self, result: VerifyResult | None = None, error: BaseException | None = None
    ) -> None:
        """Sets the outcome; later calls change nothing."""
        if not self._settled.is_set():
            began = self._began or time.monotonic()
            self.wait_seconds = began - self._came
            self.run_seconds = time.monotonic() - began
            self._result, self._error = result, error
            self._settled.set()

    def wait(self) -> VerifyResult | None:
        """Waits for the result; None when the call was abandoned first."""
        self._settled.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CallBatcher:
    """One thread that runs the waiting calls. It sweeps idle sessions when nothing waits."""

    def __init__(
        self,
        store: SessionStore,
        max_batch: int = 64,
        sweep_seconds: float | None = None,
        judge: Judge | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """`judge`: of the store, if it samples. `on_end` is called when no call runs any more."""
        self._store, self._max_batch, self._sweep_seconds = store, max_batch, sweep_seconds
        self._judge, self._on_end = judge, on_end
        if sweep_seconds is not None:
            self._sweep_seconds = min(sweep_seconds, threading.TIMEOUT_MAX)
        self._changed = threading.Condition()
        self._waiting: list[PendingCall] = []  # in the order they came
        self._running: list[PendingCall] = []
        self._closed = ""  # the reason
        self._thread = threading.Thread(target=self._run, name="nwor-worker", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(not call.abandoned for call in self._waiting)

    @property
    def closed(self) -> str:
        """Why calls are no longer run; empty while they are."""
        return self._closed

    def submit(self, call: PendingCall) -> None:
        with self._changed:
            if self._closed:
                raise WorkerStoppingError(self._closed)
            self._waiting.append(call)
            self._changed.notify()

    def drain(self, grace_seconds: float) -> None:
        """Refuses the calls that wait, and later ones. The batch that runs has so much time left;
        then its calls are refused too.
        """
        for call in self._refuse(_STOPPING):
            call.settle(error=WorkerStoppingError(_STOPPING))
        self._thread.join(min(max(grace_seconds, 0), threading.TIMEOUT_MAX))
        for call in list(self._running):
            call.settle(error=WorkerStoppingError(_CUT_SHORT))

    def join(self) -> None:
        """Waits for the batch that runs. REQUIRES: `drain` was called."""
        self._thread.join()

    def _refuse(self, reason: str) -> list[PendingCall]:
        """Refuses all later calls; returns those that wait, for the caller to settle."""
        with self._changed:
            self._closed = self._closed or reason
            refused, self._waiting = self._waiting, []
            self._changed.notify()
        return refused

    def _run(self) -> None:
        batch: list[PendingCall] | None = []
        try:
            while (batch := self._take()) is not None:
                if batch:
                    self._running = batch
                    self._verify(batch)
                    self._running = []
                else:
                    self._sweep()
        except BaseException as error:  # or waiting calls would wait for ever
            logger.exception("worker: calls can no longer be run; restart the worker")
            for call in [*(batch or []), *self._refuse(_ENDED)]:
                call.settle(error=error)
            if self._on_end is not None:
                self._on_end()

    def _take(self) -> list[PendingCall] | None:
        """Returns the next batch; an empty one when it is time to sweep, None at the end."""
        with self._changed:
            while not self._closed:
                if batch := self._pick():
                    return batch
                if not self._changed.wait(self._sweep_seconds):
                    return []
        return None

    def _pick(self) -> list[PendingCall]:
        """Takes calls that can share a pass: different sessions, all with long prompts or none."""
        waiting = [call for call in self._waiting if not call.abandoned]
        batch: list[PendingCall] = []
        sessions: set[str] = set()
        for call in waiting:
            fits = len(batch) < self._max_batch and call.is_long == waiting[0].is_long
            if fits and call.session not in sessions:
                batch.append(call)
            sessions.add(call.session)  # later calls of a session wait
        taken = set(map(id, batch))
        self._waiting = [call for call in waiting if id(call) not in taken]
        return batch

    def _verify(self, batch: list[PendingCall]) -> None:
        # A call that may be refused runs alone, so that it does not fail the others.
        together = []
        for call in batch:
            if self._is_doubtful(call):
                self._verify_together([call])
            else:
                together.append(call)
        self._verify_together(together)

    def _is_doubtful(self, call: PendingCall) -> bool:
        try:
            return self._store.info(call.session).length != call.prefix_len
        except UnknownSessionError:
            return call.prefix_len != 0
        except Exception:
            return True

    def _verify_together(self, batch: list[PendingCall]) -> None:
        """Runs a batch. A failed batch changes nothing; its halves are run to find the fault."""
        batch = [call for call in batch if not call.abandoned]
        if not batch:
            return
        for call in batch:
            call.begin()
        sampled = {call.session: call.sampling for call in batch if call.sampling is not None}
        try:
            with self._judge.using(sampled) if self._judge is not None else nullcontext():
                results = self._store.verify_batch([call.request for call in batch])
        except BaseException as error:  # the thread must not end: later calls would wait for ever
            if len(batch) == 1:
                batch[0].settle(error=error)
                return
            middle = len(batch) // 2
            self._verify_together(batch[:middle])
            self._verify_together(batch[middle:])
            return
        for call, result in zip(batch, results, strict=True):
            call.settle(result)

    def _sweep(self) -> None:
        try:
            self._store.sweep()
        except Exception:
            logger.exception("worker: could not end idle sessions")
