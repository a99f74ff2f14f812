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

from .accounting import CallAccount, count_unauthenticated
from .address import cannot_bind, check_address, join_address
from .batcher import CallBatcher, PendingCall
from .judging import Judge, read_sampling
from .limits import Limits
from .rpc import CALLS, grpc, handlers, messages
from .security import ServerSecurity
from .services import Health, TokenCheck, add_reflection
from .status_codes import CallAbandonedError, WorkerStoppingError, status_of

if TYPE_CHECKING:
    from nwor_specpv import SessionStore, VerifyResult

logger = logging.getLogger("nwor_specpv")

GRACE_SECONDS = 30.0
_KEEPALIVE_MS = 60_000
_LEAST_PING_MS = 1000
_FLUSH_SECONDS = 2.0  # for answers that are ready when the server stops
_SPARE_CALLS = 64  # for Ping, health, reflection and refusals while all others wait
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
        judge: Judge | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        security: ServerSecurity | None = None,
        insecure: bool = False,
    ) -> None:
        """Binds the port (0: any free one; `port` says which). Raises NworError if it is in use.

        `model`, `vocab_size`, `max_sessions`, `max_length` describe the store to clients.
        `sweep_seconds`: how often an idle server ends idle sessions; None: never.
        `judge`: whose `accept` the store has; None: calls cannot sample.
        `token_bytes`: gives the bytes of a token; None: calls cannot ask for them.
        `security`: needed on addresses that other machines reach, unless `insecure`.
        """
        if max_batch < 1:
            raise NworError(f"max_batch: got {max_batch}, expected 1 or more")
        if sweep_seconds is not None and not sweep_seconds > 0:
            raise NworError(f"sweep_seconds: got {sweep_seconds}, expected more than 0, or None")
        self._store, self.host, self.limits = store, host, limits or Limits()
        self._max_batch, self._sweep_seconds = max_batch, sweep_seconds
        self._judge, self._token_bytes = judge, token_bytes
        security = security or ServerSecurity()
        security.check_host(host, insecure=insecure)
        self._about = {
            "version": __version__,
            "model": model,
            "vocab_size": vocab_size,
            "max_sessions": max_sessions,
            "max_length": max_length,
            "max_tree_rows": self.limits.max_tree_rows,
            "max_prompt_tokens": self.limits.max_prompt_tokens,
            "max_distribution_bytes": self.limits.max_distribution_bytes,
            "samples": judge is not None,
            "has_token_bytes": token_bytes is not None,
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
                # Clients ask whether the worker is there; those that are gone are found alike.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING_MS),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
                ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
            ),
            maximum_concurrent_rpcs=most_calls,
            interceptors=(TokenCheck(security, count_unauthenticated),),
        )
        answers = {name: self._answering(name) for name in CALLS}
        self._server.add_generic_rpc_handlers((handlers(answers),))
        self._health = Health(self._server)
        add_reflection(self._server)
        self.port = _bind(self._server, host, port, security)
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
        self._batcher = CallBatcher(
            self._store, self._max_batch, self._sweep_seconds, self._judge, self._health.stop
        )
        self._server.start()
        return self

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Stops serving. The batch that runs is answered; calls that wait or come are refused.

        Health says NOT_SERVING at once. After `grace_seconds` running calls are refused too; the
        pass they wait for ends before this returns.
        """
        self._used = True
        self._health.stop()
        if self._batcher is not None:
            self._batcher.drain(grace_seconds)
        self._server.stop(_FLUSH_SECONDS).wait()
        if self._batcher is not None:
            self._batcher.join()
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
            account = CallAccount(request)
            try:
                with self._turn(name):
                    reply = answer(request, context)
                account.answered(reply)
                return reply
            except BaseException as error:
                code, details = status_of(error)
                if code is grpc.StatusCode.INTERNAL:
                    logger.error("worker: %s failed: %r", name, error, exc_info=error)
            account.failed(code)
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
        if request.want_token_bytes and self._token_bytes is None:
            raise NworError("want_token_bytes: got true, expected false: this worker knows no text")
        tree = _draft_tree(request)
        sampling = read_sampling(request, tree, self._about["vocab_size"])
        if sampling is not None and self._judge is None:
            raise NworError(
                f"temperature: got {sampling.temperature}, expected 0: this worker does not sample"
            )
        call = PendingCall(
            _verify_request(request, tree),
            request.session,
            request.expected_prefix_len,
            len(request.new_tokens),
            sampling,
        )
        # gRPC calls this when the call ends, also when its client leaves or its time is up.
        if not context.add_callback(call.abandon):
            raise CallAbandonedError("the client left before its turn")
        self._batcher.submit(call)
        result = call.wait()
        if result is None:
            raise CallAbandonedError("the client left before its result")
        return self._reply(request, result, call)

    def _reply(self, request: Any, result: VerifyResult, call: PendingCall) -> Any:
        num_drafts, tokens = max(0, len(request.tree.tokens) - 1), []
        if request.want_token_bytes:
            emitted = [*result.tokens, result.next_token]
            tokens = [self._token_bytes(token) for token in emitted]
        return messages.VerifyDraftsReply(
            accepted_rows=result.accepted_rows,
            next_token=result.next_token,
            cache_hit=result.cache_hit,
            length=result.length,
            rows_run=result.rows_run,
            rows_saved=result.rows_saved,
            finish=_FINISH[result.finish],
            acceptance_rate=len(result.accepted_rows) / num_drafts if num_drafts else 0.0,
            wait_us=round(call.wait_seconds * 1e6),
            run_us=round(call.run_seconds * 1e6),
            token_bytes=tokens,
        )

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


def _bind(server: Any, host: str, port: int, security: ServerSecurity) -> int:
    check_address(host, port)  # gRPC does not say why
    address = join_address(host, port)
    try:
        if security.certificate is None:
            bound = server.add_insecure_port(address)
        else:
            pair = (security.key, security.certificate)
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    except RuntimeError as error:
        raise cannot_bind(host, port, error) from None
    if bound == 0:
        raise cannot_bind(host, port, "gRPC refused it")
    return bound


def _draft_tree(request: Any) -> DraftTree | None:
    if not request.tree.tokens and not request.tree.parents:
        return None
    tree = DraftTree(list(request.tree.tokens), list(request.tree.parents) or None)
    if request.chunk_rows == 0:
        tree.validate()  # or it could fail a batch of others
    return tree


def _verify_request(request: Any, tree: DraftTree | None) -> VerifyRequest:
    return VerifyRequest(
        request.session,
        tree,
        list(request.new_tokens),
        request.expected_prefix_len,
        request.chunk_rows,
        list(request.stop_ids),
        request.max_new_tokens,
    )
