"""The loop of a remote drafter: drafts here, verifies at a worker.

    with Client("127.0.0.1:50051") as client:
        drafted = decode(client, make_drafter("ngram"), prompt_ids, max_new_tokens=100)

With `retry_seconds` a worker that stops, restarts or cannot be reached is tried again: the session
sends the whole sequence to the next one at that address.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nwor_specpv.drafters.base import TreeConfig
from nwor_specpv.errors import NworError

from .client import Client, RemoteResult, RemoteSession
from .status_codes import WorkerError

if TYPE_CHECKING:
    from nwor_specpv import Drafter, DraftTree

_PAUSE_SECONDS = 0.2  # between two attempts
DEFAULT_TREE = TreeConfig(rows=8, depth=6, top_k=2)


@dataclass
class Drafted:
    """A remote drafter's tokens, and what they took."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = "length"  # or "stop"
    calls: int = 0
    drafts: int = 0
    accepted: int = 0
    seconds: float = 0.0  # all in all
    run_seconds: float = 0.0  # of the worker's passes
    wait_seconds: float = 0.0  # until calls had their turn

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_call(self) -> float:
        return len(self.token_ids) / self.calls if self.calls else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafts if self.drafts else 0.0

    def as_dict(self) -> dict[str, Any]:
        names = ("tokens_per_second", "tokens_per_call", "acceptance_rate")
        return asdict(self) | {name: getattr(self, name) for name in names}


def decode(
    client: Client,
    drafter: Drafter | None,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    tree: TreeConfig = DEFAULT_TREE,
    stop_ids: Sequence[int] = (),
    on_token: Callable[[int], None] | None = None,
    retry_seconds: float = 0.0,
    **sampling: Any,
) -> Drafted:
    """Decodes up to `max_new_tokens` behind the prompt. `drafter` None: no drafts.

    `sampling` are the options of `RemoteSession.verify`: temperature, top_k, top_p, seed. The
    drafter gets no features of the target.
    """
    if not len(prompt):
        raise NworError("prompt: got no tokens, expected one at least")
    if max_new_tokens < 1:
        raise NworError(f"max_new_tokens: got {max_new_tokens}, expected 1 or more")
    name = f"draft-{uuid.uuid4()}"
    done, tokens, begun = Drafted(), list(prompt), time.monotonic()
    if drafter is not None:
        drafter.begin(name, tokens)
    try:
        with client.session(name, resend=True) as session:
            while len(done.token_ids) < max_new_tokens:
                drafts = None if drafter is None else drafter.draft([name], tree)[0]
                sent = tokens[session.length :]
                result = _verify(
                    session,
                    drafts,
                    sent,
                    retry_seconds,
                    stop_ids=stop_ids,
                    max_new_tokens=max_new_tokens - len(done.token_ids),
                    **sampling,
                )
                new = [*result.tokens, result.next_token]
                if drafter is not None:
                    drafter.observe(name, sent[1:] + new, None)
                tokens += new
                _add(done, drafts, result, new)
                for token in new if on_token is not None else ():
                    on_token(token)
                if result.finish is not None:
                    done.finish = result.finish
                    break
    finally:
        done.seconds = time.monotonic() - begun
        if drafter is not None:
            drafter.end(name)
    return done


def _add(done: Drafted, drafts: DraftTree | None, result: RemoteResult, new: list[int]) -> None:
    done.token_ids += new
    done.calls += 1
    done.drafts += 0 if drafts is None else len(drafts.tokens) - 1
    done.accepted += len(result.accepted_rows)
    done.run_seconds += result.run_seconds
    done.wait_seconds += result.wait_seconds


def _verify(
    session: RemoteSession,
    drafts: DraftTree | None,
    sent: list[int],
    retry_seconds: float,
    **options: Any,
) -> RemoteResult:
    end = time.monotonic() + retry_seconds
    while True:
        try:
            return session.verify(drafts, sent, **options)
        except WorkerError as error:
            if error.code != "UNAVAILABLE" or time.monotonic() > end:
                raise
            time.sleep(_PAUSE_SECONDS)
