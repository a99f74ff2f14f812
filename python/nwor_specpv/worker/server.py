"""Serves a session store over gRPC."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nwor_specpv import DraftTree, VerifyRequest, __version__
from nwor_specpv.errors import CapacityError, NworError

from .address import cannot_bind, check_address, join_address
from .batcher import CallBatcher, PendingCall
from .limits import Limits
from .rpc import CALLS, grpc, handlers, messages
from .status_codes import WorkerStoppingError, status_of

if TYPE_CHECKING:
    from nwor_specpv import SessionStore, VerifyResult

logger = logging.getLogger("nwor_specpv")

GRACE_SECONDS = 30.0
_SPARE_CALLS = 16  # for Ping and for refusals while all others wait
_FINISH = {
    None: messages.FINISH_NONE,
    "stop": messages.FINISH_STOP,
    "length": messages.FINISH_LENGTH,
}


class Server:
    """Serves from `start` to `stop`. Other threads may use the store too."""

    def __init__(
        self,
        store: SessionStore,
        *,
        model: str,
        vocab_size: int,
        limits: Limits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_batch: int = 64,
        max_sessions: int = 0,
        max_length: int = 0,
        sweep_seconds: float | None = None,
    ) -> None:
        """Binds the port (0: any free one; `port` says which). Raises NworError if it is in use.

        `model`, `vocab_size`, `max_sessions`, `max_length` describe the store to clients.
        `sweep_seconds`: how often an idle server ends idle sessions; None: never.
        """
        if max_batch < 1:
            raise NworError(f"max_batch: got {max_batch}, expected 1 or more")
        if sweep_seconds is not None and not sweep_seconds > 0:
            raise NworError(f"sweep_seconds: got {sweep_seconds}, expected more than 0, or None")
        self._store, self.host, self.limits = store, host, limits or Limits()
        self._max_batch, self._sweep_seconds = max_batch, sweep_seconds
        self._about = {
            "version": __version__,
            "model": model,
            "vocab_size": vocab_size,
            "max_sessions": max_sessions,
            "max_length": max_length,
            "max_tree_rows": self.limits.max_tree_rows,
            "max_prompt_tokens": self.limits.max_prompt_tokens,
        }
        # Both wait for the model, so each has its own limit.
        self._turns = {
            name: threading.BoundedSemaphore(self.limits.max_calls)
            for name in ("VerifyDrafts", "EndSession")
        }
        most_calls = len(self._turns) * self.limits.max_calls + _SPARE_CALLS
        self._threads = ThreadPoolExecutor(most_calls, "nwor-worker-call")
        self._server = grpc.server(
            self._threads,
            options=(
                ("grpc.max_receive_message_length", self.limits.message_bytes),
                ("grpc.so_reuseport", 0),  # or two workers could share a port unnoticed
            ),
            maximum_concurrent_rpcs=most_calls,
        )
        answers = {name: self._answering(name) for name in CALLS}
        self._server.add_generic_rpc_handlers((handlers(answers),))
        self.port = _bind(self._server, host, port)
        self._batcher: CallBatcher | None = None
        self._used = False

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    def start(self) -> Server:
        """Starts serving; may be called once."""
        if self._used:
            raise NworError("start: this server was started or stopped before; make a new Server")
        self._used = True
        self._batcher = CallBatcher(self._store, self._max_batch, self._sweep_seconds)
        self._server.start()
        return self

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stops serving. The batch that runs is answered; calls that wait are refused.

        After `grace_seconds` running calls are refused too; the pass they wait for ends first.
        """
        self._used = True
        stopped = self._server.stop(grace_seconds)
        if self._batcher is not None:
            self._batcher.close()
        stopped.wait()
        self._threads.shutdown()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _answering(self, name: str) -> Callable[[Any, Any], Any]:
        """Returns the function that gRPC calls; it turns errors into a status."""
        answer = {
            "VerifyDrafts": self._verify_drafts,
            "EndSession": self._end_session,
            "Ping": self._ping,
        }[name]

        def answering(request: Any, context: Any) -> Any:
            try:
                with self._turn(name):
                    return answer(request, context)
            except BaseException as error:
                code, details = status_of(error)
                if code is grpc.StatusCode.INTERNAL:
                    logger.error("worker: %s failed: %r", name, error, exc_info=error)
            return context.abort(code, details)  # raises

        return answering

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Counts the calls of this name; raises CapacityError when there are too many."""
        turns = self._turns.get(name)
        if turns is None:
            yield
            return
        if not turns.acquire(blocking=False):
            most = self.limits.max_calls
            calls = "call" if most == 1 else "calls"
            raise CapacityError(f"{name}: got more than {most} {calls} at once; try again later")
        try:
            yield
        finally:
            turns.release()

    def _verify_drafts(self, request: Any, context: Any) -> Any:
        self.limits.check(request)
        call = PendingCall(
            _verify_request(request),
            request.session,
            request.expected_prefix_len,
            len(request.new_tokens),
        )
        # gRPC calls this when the call ends, also when its client leaves or its time is up.
        if context.add_callback(call.abandon):
            self._batcher.submit(call)
            result = call.wait()
            if result is not None:
                return _reply(result)
        return messages.VerifyDraftsReply()  # nobody receives it

    def _end_session(self, request: Any, context: Any) -> Any:
        del context
        self.limits.check_name(request.session)
        self._store.end_session(request.session)
        return messages.EndSessionReply()

    def _ping(self, request: Any, context: Any) -> Any:
        del request, context
        if self._batcher.closed:
            raise WorkerStoppingError(self._batcher.closed)
        stats = self._store.stats()
        return messages.PingReply(
            sessions=stats["live"],
            held_bytes=stats["held_bytes"],
            max_bytes=stats["max_bytes"],
            waiting=self._batcher.num_waiting,
            **self._about,
        )


def _bind(server: Any, host: str, port: int) -> int:
    check_address(host, port)  # gRPC does not say why
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise cannot_bind(host, port, error) from None
    if bound == 0:
        raise cannot_bind(host, port, "gRPC refused it")
    return bound


def _verify_request(request: Any) -> VerifyRequest:
    tree = None
    if request.tree.tokens or request.tree.parents:
        tree = DraftTree(list(request.tree.tokens), list(request.tree.parents) or None)
        if request.chunk_rows == 0:
            tree.validate()  # or it could fail a batch of others
    return VerifyRequest(
        request.session,
        tree,
        list(request.new_tokens),
        request.expected_prefix_len,
        request.chunk_rows,
        list(request.stop_ids),
        request.max_new_tokens,
    )


def _reply(result: VerifyResult) -> Any:
    return messages.VerifyDraftsReply(
        accepted_rows=result.accepted_rows,
        next_token=result.next_token,
        cache_hit=result.cache_hit,
        length=result.length,
        rows_run=result.rows_run,
        rows_saved=result.rows_saved,
        finish=_FINISH[result.finish],
    )
