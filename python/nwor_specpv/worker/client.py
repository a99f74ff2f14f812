"""The client of a worker; its sessions are used like those of a store.

    with Client("127.0.0.1:50051") as client, client.session("s", resend=True) as session:
        result = session.verify(tree, prompt)
        result = session.verify(tree, [result.next_token])

With `resend` a session remembers the tokens it has sent and those that were accepted. After a
DesyncError or UnknownSessionError it ends the worker's session, sends the whole sequence once, and
raises whatever that raises. Without `resend` the caller gets the error. The caller also gets it for
a session that another client has started, because its first tokens are not known here.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nwor_specpv.errors import DesyncError, NworError, UnknownSessionError

from .distributions import write_distributions
from .rpc import grpc, messages, stubs
from .security import ClientSecurity
from .status_codes import WorkerError, error_of

if TYPE_CHECKING:
    from nwor_specpv import DraftTree

_MOST_SECONDS = 10**9  # gRPC has 64 bits for nanoseconds since 1970; a later deadline is over
_MOST_KEEPALIVE_SECONDS = 86400
_PING_AGAIN_SECONDS = 0.1
_FINISH = {messages.FINISH_STOP: "stop", messages.FINISH_LENGTH: "length"}


@dataclass(frozen=True)
class RemoteResult:
    """The same as `VerifyResult`, and what the call took."""

    accepted_rows: list[int]  # of the tree, root excluded
    tokens: list[int]  # tokens of those rows
    next_token: int  # the correction or bonus token, or the last; not cached
    cache_hit: bool  # the worker had the session
    length: int  # tokens cached now: the next expected_prefix_len
    rows_run: int
    rows_saved: int
    finish: str | None  # "stop" or "length" when next_token is the sequence's last
    acceptance_rate: float  # accepted drafts by all drafts; 0 without drafts
    wait_seconds: float  # until the call's turn came
    run_seconds: float  # of its passes
    token_bytes: list[bytes]  # of `tokens` and `next_token`, where they were asked for


@dataclass(frozen=True)
class WorkerInfo:
    """The description of a worker; 0: no limit."""

    version: str
    model: str
    vocab_size: int
    sessions: int
    max_sessions: int
    held_bytes: int
    max_bytes: int
    max_tree_rows: int
    max_prompt_tokens: int
    max_length: int
    waiting: int  # calls whose turn has not come
    samples: bool  # takes a temperature
    has_token_bytes: bool
    max_distribution_bytes: int


class Client:
    """A connection to a worker, opened by the first call. Thread-safe; its sessions are not."""

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        keepalive_seconds: float = 30.0,
        root_certificate: str | Path | None = None,
        tls: bool = False,
        token: str | None = None,
        insecure: bool = False,
    ) -> None:
        """`timeout`: seconds that a call may take; None or infinity: no limit.

        `keepalive_seconds`: how often a waiting call asks whether the worker's machine is still
        there. One that does not answer for as long again is `UNAVAILABLE`.
        `root_certificate`: a PEM file that the worker's certificate is checked against, also by
        $NWOR_WORKER_ROOT_CERTIFICATE; `tls` alone: the root certificates that gRPC comes with.
        `token`: also by $NWOR_WORKER_TOKEN or $NWOR_WORKER_TOKEN_FILE. Other machines need both,
        unless `insecure`.
        """
        self.address, self.timeout = address, _seconds(timeout)
        self._security = ClientSecurity.load(tls, root_certificate, token)
        self._security.check_address(address, insecure=insecure)
        if not 1 <= keepalive_seconds <= _MOST_KEEPALIVE_SECONDS:
            raise NworError(
                f"keepalive_seconds: got {keepalive_seconds}, expected 1 to "
                f"{_MOST_KEEPALIVE_SECONDS}"
            )
        every = round(keepalive_seconds * 1000)
        options = (
            ("grpc.enable_http_proxy", 0),  # a proxy is for the web, not for workers
            ("grpc.keepalive_time_ms", every),
            ("grpc.keepalive_timeout_ms", every),
            ("grpc.http2.ping_timeout_ms", every),  # newer versions of gRPC go by this one
        )
        if self._security.tls:
            credentials = grpc.ssl_channel_credentials(self._security.root_certificate)
            self._channel = grpc.secure_channel(address, credentials, options)
        else:
            self._channel = grpc.insecure_channel(address, options)
        self._calls = stubs(self._channel)
        self._closed = False

    def ping(self, *, wait: bool = False) -> WorkerInfo:
        """Asks for a description. `wait`: waits for a worker, as long as a call may take.

        It asks again where a connection breaks meanwhile, such as that to a worker which hung.
        """
        end = math.inf if self.timeout is None else time.monotonic() + self.timeout
        while True:
            left = None if end == math.inf else max(0.0, end - time.monotonic())
            try:
                reply = self.call("Ping", messages.PingRequest(), wait=wait, timeout=left)
                break
            except WorkerError as error:
                again = wait and error.code == "UNAVAILABLE"
                if not again or time.monotonic() + _PING_AGAIN_SECONDS >= end:
                    raise
                time.sleep(_PING_AGAIN_SECONDS)
        return WorkerInfo(**{name: getattr(reply, name) for name in WorkerInfo.__annotations__})

    def session(self, name: str, *, resend: bool = False) -> RemoteSession:
        """Returns a session; its first verify starts it. No other client may use the name."""
        return RemoteSession(self, name, resend=resend)

    def call(
        self, name: str, request: Any, *, wait: bool = False, timeout: float | None = None
    ) -> Any:
        """`timeout`: by default the client's."""
        try:
            return self._calls[name](
                request,
                timeout=self.timeout if timeout is None else timeout,
                metadata=self._security.metadata,
                wait_for_ready=wait,
            )
        except grpc.RpcError as error:
            at = f"{self.address}{' (with TLS)' if self._security.tls else ' (without TLS)'}"
            if error.code() is grpc.StatusCode.CANCELLED and not self._closed:
                # gRPC cancels calls that reach a server in the moment it stops.
                raise WorkerError(f"worker at {at}: it stopped", "UNAVAILABLE") from None
            raise error_of(error, at) from None
        except ValueError:  # gRPC raises it on a closed channel
            raise NworError(f"client: {name} was called after close") from None

    def close(self) -> None:
        """Cancels waiting calls. The worker keeps the sessions until they are idle too long."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RemoteSession:
    """One sequence of a worker. Not thread-safe."""

    def __init__(self, client: Client, name: str, *, resend: bool = False) -> None:
        self.client, self.name = client, name
        self.length = 0  # tokens cached, from the last result
        self._resend = resend
        self._tokens: list[int] = []  # the cached tokens; empty when the first are not known

    def __repr__(self) -> str:
        return f"RemoteSession({self.name!r}, length={self.length})"

    def verify(
        self,
        tree: DraftTree | None,
        new_tokens: Sequence[int],
        expected_prefix_len: int | None = None,
        *,
        chunk_rows: int = 0,
        stop_ids: Sequence[int] = (),
        max_new_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        draft_probs: Any = None,
        draft_log_probs: Sequence[Mapping[int, float]] | None = None,
        token_bytes: bool = False,
    ) -> RemoteResult:
        """`SessionStore.verify`; by default it expects the length of the last result.

        A `temperature` above 0 samples, with `top_k` (0: all) and `top_p` (1: all). The same `seed`
        gives the same tokens; None: a new one. For a chain of drafts that were drawn at random,
        `draft_probs` [drafts, vocabulary] or `draft_log_probs` (for each draft a mapping of all
        tokens that it could have been to their log-probabilities) lets more of them be accepted.
        """
        expected = self.length if expected_prefix_len is None else expected_prefix_len
        new = _integers("new_tokens", new_tokens)
        options = {
            "chunk_rows": chunk_rows,
            "stop_ids": _integers("stop_ids", stop_ids),
            "max_new_tokens": max_new_tokens,
            "sampling": _sampling(temperature, top_k, top_p, seed),
            "distributions": write_distributions(draft_probs, draft_log_probs),
            "want_token_bytes": token_bytes,
        }
        known = self._known(expected)
        try:
            result = self._verify(tree, new, expected, options)
        except (DesyncError, UnknownSessionError):
            if known is None:
                raise
            with contextlib.suppress(UnknownSessionError):
                self._end()
            result = self._verify(tree, known + new, 0, options)
        self._tokens = [] if known is None else known + new + result.tokens
        self.length = result.length
        return result

    def end(self) -> None:
        """Ends the session. Raises UnknownSessionError when the worker does not have it.

        The next verify starts a new sequence, also after an error.
        """
        self.length, self._tokens = 0, []
        self._end()

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # It may have been ended or evicted, and an error inside the block must not be hidden.
        with contextlib.suppress(UnknownSessionError if kind is None else NworError):
            self.end()

    def _known(self, length: int) -> list[int] | None:
        """Its first `length` tokens, to send again; None unless all are known."""
        known = self._tokens[:length] if self._resend else None
        return None if known is None or len(known) != length else known

    def _end(self) -> None:
        self.client.call("EndSession", messages.EndSessionRequest(session=self.name))

    def _verify(
        self,
        tree: DraftTree | None,
        new_tokens: list[int],
        expected_prefix_len: int,
        options: dict[str, Any],
    ) -> RemoteResult:
        tokens, parents = _rows(tree)
        try:
            request = messages.VerifyDraftsRequest(
                session=self.name,
                tree=messages.DraftTree(tokens=tokens, parents=parents),
                new_tokens=new_tokens,
                expected_prefix_len=expected_prefix_len,
                **options,
            )
        except (TypeError, ValueError) as error:  # a value that does not fit its field
            raise NworError(f"verify: a value does not fit the message: {error}") from None
        reply = self.client.call("VerifyDrafts", request)
        rows = list(reply.accepted_rows)
        return RemoteResult(
            accepted_rows=rows,
            tokens=[tokens[row] for row in rows],
            next_token=reply.next_token,
            cache_hit=reply.cache_hit,
            length=reply.length,
            rows_run=reply.rows_run,
            rows_saved=reply.rows_saved,
            finish=_FINISH.get(reply.finish),
            acceptance_rate=reply.acceptance_rate,
            wait_seconds=reply.wait_us * 1e-6,
            run_seconds=reply.run_us * 1e-6,
            token_bytes=list(reply.token_bytes),
        )


def _seconds(timeout: float | None) -> float | None:
    if timeout is None or timeout == math.inf:
        return None
    if not 0 < timeout <= _MOST_SECONDS:
        raise NworError(
            f"timeout: got {timeout}, expected more than 0 and at most {_MOST_SECONDS} seconds, "
            "or None for no limit"
        )
    return timeout


def _sampling(temperature: float, top_k: int, top_p: float, seed: int | None) -> Any:
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise NworError(f"{name}: got {value!r}, expected a number")
    try:
        return messages.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except (TypeError, ValueError) as error:
        raise NworError(f"top_k, seed: got {top_k!r} and {seed!r}: {error}") from None


def _rows(tree: Any) -> tuple[list[int], list[int]]:
    """Tokens and parents of a DraftTree, a Tree of one request, or a similar object."""
    if tree is None:
        return [], []
    if not hasattr(tree, "tokens") or not hasattr(tree, "parents"):
        raise NworError(f"tree: got {type(tree).__name__}, expected a DraftTree or None")
    return _integers("tree", tree.tokens), _integers("parents", tree.parents)


def _integers(name: str, values: Any) -> list[int]:
    """Reads integers from a sequence, a tensor, or a tensor of one request's rows."""
    rows = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(rows, Sequence):
        raise NworError(f"{name}: got {values!r}, expected integers")
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    for row in rows:
        if isinstance(row, bool) or not hasattr(row, "__index__"):
            raise NworError(f"{name}: got {row!r}, expected integers")
    return [operator.index(row) for row in rows]
