"""A worker over the shipped story model, in this process, and clients that draft by n-grams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nwor_specpv import DraftTree, SessionBatch
from nwor_specpv.models.tiny_model import TinyModel, TinyTokenizer
from nwor_specpv.worker import Client, Judge, Limits, RemoteSession, Server
from tests.python.models.tiny_decoding import decode_plain, draft_by_ngrams
from tests.python.session.tiny_host import TinyHost

# Of anything that ends by itself; a machine may be slow.
PATIENCE_S = 300.0
NO_PROXY = (("grpc.enable_http_proxy", 0),)  # one that the environment names is for the web

MODEL = TinyModel()
PROMPT = TinyTokenizer().encode("Once upon a time, there was a little girl")
LENGTH = 40
PLAIN = PROMPT + decode_plain(MODEL, PROMPT, LENGTH + 30).tokens


class GatedHost(TinyHost):
    """A host whose model waits at a gate and can be made to fail. Its calls may sample."""

    def __init__(self, **options: Any) -> None:
        self.judge = Judge()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.failure: Callable[[SessionBatch], BaseException | None] = lambda batch: None
        super().__init__(model=MODEL, accept=self.judge.accept, **options)

    def forward(self, batch: SessionBatch) -> torch.Tensor:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        error = self.failure(batch)
        if error is not None:
            raise error
        return super().forward(batch)


class Worker:
    """A host, its server, and a client."""

    def __init__(self, target: GatedHost, server: Server) -> None:
        self.target, self.server = target, server
        self.client = Client(server.address, timeout=PATIENCE_S)

    @property
    def store(self) -> Any:
        return self.target.store

    def until_waiting(self, count: int) -> None:
        """Until so many calls wait for their turn."""
        until(lambda: self.client.ping().waiting == count)


@contextmanager
def serving(
    limits: Limits | None = None,
    sweep_seconds: float | None = None,
    server_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Worker]:
    target = GatedHost(**options)
    server = Server(
        target.store,
        model="stories260K",
        vocab_size=MODEL.shape.vocabulary,
        limits=limits,
        sweep_seconds=sweep_seconds,
        judge=target.judge,
        **(server_options or {}),
    )
    with server:
        worker = Worker(target, server)
        try:
            yield worker
        finally:
            target.gate.set()
            worker.client.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.005)


class Calls:
    """Functions that run at the same time, each in a thread."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self.so_far: list[Any] = [None] * len(functions)  # None for what has not ended too
        self._threads = [
            threading.Thread(target=self._run, args=(index, function), daemon=True)
            for index, function in enumerate(functions)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, function: Callable[[], Any]) -> None:
        try:
            self.so_far[index] = function()
        except BaseException as error:
            self.so_far[index] = error

    def outcomes(self) -> list[Any]:
        """What each returned or raised."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return self.so_far


def ngram_tree(tokens: list[int], branches: int) -> DraftTree | None:
    if branches == 0:
        return None
    tree = draft_by_ngrams(tokens, 4, branches)
    return DraftTree([tokens[-1], *tree.tokens], [-1, *tree.parents])


def decode(
    session: RemoteSession, prompt: list[int], count: int, branches: int, **options: Any
) -> list[int]:
    """`count` new tokens or a few more."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tree = ngram_tree(tokens, branches)
        result = session.verify(tree, tokens[session.length :], **options)
        tokens += [*result.tokens, result.next_token]
        assert result.length == session.length == len(tokens) - 1
    return tokens
