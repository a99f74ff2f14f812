"""SessionStore in front of a real model: the same tokens as plain decoding, whatever is drafted."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nwor_specpv import (
    CapacityError,
    DesyncError,
    DraftTree,
    Metrics,
    NworError,
    Session,
    SessionBatch,
    SessionStore,
    UnknownSessionError,
    VerifyRequest,
    accept_sampling,
    tree_from_parents,
)
from nwor_specpv.models.tiny_model import TinyModel, TinyTokenizer
from tests.python.models.tiny_decoding import decode_plain, draft_by_ngrams
from tests.python.session.tiny_host import TinyHost, page_bytes

MODEL = TinyModel()
PROMPT = TinyTokenizer().encode("Once upon a time, there was a little girl")
LENGTH = 40
PLAIN = PROMPT + decode_plain(MODEL, PROMPT, LENGTH + 20).tokens


@pytest.fixture
def server() -> TinyHost:
    return TinyHost(model=MODEL)


class Client:
    """Keeps its own sequence; sends what is new."""

    def __init__(self, server: TinyHost, name: str, tokens: list[int] | None = None) -> None:
        self.store, self.name = server.store, name
        self.tokens, self.cached = list(tokens or PROMPT), 0

    def request(self, drafts: DraftTree | None = None, chunk_rows: int = 0) -> VerifyRequest:
        return VerifyRequest(self.name, drafts, self.tokens[self.cached :], self.cached, chunk_rows)

    def verify(self, drafts: DraftTree | None = None, chunk_rows: int = 0):
        new = self.tokens[self.cached :]
        return self.take(self.store.verify(self.name, drafts, new, self.cached, chunk_rows))

    def take(self, result):
        self.tokens += result.tokens
        assert result.length == len(self.tokens)
        self.cached = result.length
        self.tokens.append(result.next_token)
        return result


def ngram_tree(tokens: list[int], branches: int) -> DraftTree:
    tree = draft_by_ngrams(tokens, 4, branches)
    return DraftTree([tokens[-1], *tree.tokens], [-1, *tree.parents])


def test_a_pruned_tree_keeps_its_upper_rows() -> None:
    tree = DraftTree([3, 4, 9, 5, 8], [-1, 0, 0, 1, 2])
    assert (tree.pruned(1).tokens, tree.pruned(1).parents) == ([3, 4, 9], [-1, 0, 0])
    assert tree.pruned(2).parents == tree.parents
    with pytest.raises(NworError, match="parents: got 3 for row 1"):
        DraftTree([1, 2], [-1, 3]).pruned(1)


@pytest.mark.parametrize("branches", [0, 1, 3])
def test_decodes_like_plain_decoding(server: TinyHost, branches: int) -> None:
    client = Client(server, "one")
    while len(client.tokens) < len(PROMPT) + LENGTH:
        result = client.verify(ngram_tree(client.tokens, branches) if branches else None)
        assert result.cache_hit == (client.cached > len(PROMPT) + len(result.tokens))
    assert client.tokens == PLAIN[: len(client.tokens)]
    stats = server.store.stats()
    assert stats["live"] == 1
    assert stats["cache_misses"] == 1


def test_a_long_chain_in_chunks_equals_one_pass(server: TinyHost) -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 30]
    drafts[17] = (drafts[17] + 1) % 512
    chain = DraftTree([PROMPT[-1], *drafts])
    once, chunked = Client(server, "once"), Client(server, "chunked")
    expected, result = once.verify(chain), chunked.verify(chain, chunk_rows=8)
    assert chunked.tokens == once.tokens == PLAIN[: len(once.tokens)]
    assert result.accepted_rows == expected.accepted_rows == list(range(1, 18))
    assert (result.rows_saved, expected.rows_saved) == (31 - 24, 0)
    once.verify()
    chunked.verify()
    assert chunked.tokens == once.tokens == PLAIN[: len(once.tokens)]


def test_sessions_of_a_batch_share_a_pass(server: TinyHost) -> None:
    prompts = [PROMPT, PROMPT[:4], PROMPT[:7]]
    clients = [Client(server, str(i), prompt) for i, prompt in enumerate(prompts)]
    for _ in range(5):
        trees = [ngram_tree(client.tokens, 2) for client in clients]
        requests = [client.request(tree) for client, tree in zip(clients, trees, strict=True)]
        for client, result in zip(clients, server.store.verify_batch(requests), strict=True):
            client.take(result)
    assert server.batches == [["0", "1", "2"]] * 5
    for client, prompt in zip(clients, prompts, strict=True):
        plain = decode_plain(MODEL, prompt, 40).tokens
        assert client.tokens == (prompt + plain)[: len(client.tokens)]


def test_threads_share_passes(server: TinyHost) -> None:
    clients = [Client(server, f"thread {i}", PROMPT[: 3 + i]) for i in range(4)]

    def decode(client: Client) -> None:
        for _ in range(6):
            client.verify(ngram_tree(client.tokens, 2))

    threads = [threading.Thread(target=decode, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, client in enumerate(clients):
        plain = decode_plain(MODEL, PROMPT[: 3 + i], 60).tokens
        assert client.tokens == (PROMPT[: 3 + i] + plain)[: len(client.tokens)]


def test_what_a_client_keeps_may_be_less(server: TinyHost) -> None:
    client = Client(server, "a")
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 12]
    client.verify(DraftTree([PROMPT[-1], *drafts]))
    server.store.rollback("a", len(PROMPT) + 3)
    client.tokens, client.cached = client.tokens[: len(PROMPT) + 4], len(PROMPT) + 3
    for _ in range(5):
        client.verify()
    assert client.tokens == PLAIN[: len(client.tokens)]


def test_a_fork_goes_its_own_way(server: TinyHost) -> None:
    client = Client(server, "a")
    client.verify()
    server.store.fork("a", "b")
    other = Client(server, "b", client.tokens)
    other.cached = client.cached
    other.tokens[-1] = 300  # as sampling might have drawn
    prompt = list(other.tokens)
    for _ in range(6):
        client.verify()
        other.verify()
    assert client.tokens == PLAIN[: len(client.tokens)]
    plain = decode_plain(MODEL, prompt, 10).tokens
    assert other.tokens == (prompt + plain)[: len(other.tokens)]


def test_an_acceptor_of_ones_own(server: TinyHost) -> None:
    def nothing(batch, logits):
        choices = logits.argmax(-1)[batch.tree_rows[:, 0]]
        sessions = len(batch.sessions)
        path = torch.full((sessions, 1), -1, dtype=torch.int32)
        return path, torch.zeros(sessions, dtype=torch.int32), choices

    picky = TinyHost(model=MODEL, accept=nothing)
    client = Client(picky, "a")
    for _ in range(4):
        result = client.verify(DraftTree([client.tokens[-1], *PLAIN[len(client.tokens) :][:3]]))
        assert result.accepted_rows == []
    assert client.tokens == PLAIN[: len(client.tokens)]


def test_sampling_is_an_acceptor() -> None:
    """Cold enough to be greedy: the tokens are known, the way there is the sampler's."""

    def sample(batch, logits):
        probs = torch.softmax(logits * 1e4, -1)[batch.tree_rows]
        coins = torch.full(batch.tree_tokens.shape, 0.5)
        return accept_sampling(
            batch.tree_tokens,
            probs,
            batch.first_child,
            batch.next_sibling,
            coins,
            coins[:, 0].contiguous(),
        )

    server = TinyHost(model=MODEL, accept=sample)
    clients = [Client(server, "a"), Client(server, "b", PROMPT[:6])]
    for _ in range(6):
        known = clients[0].tokens
        right = PLAIN[len(known) : len(known) + 2]
        tree = DraftTree([known[-1], (right[0] + 1) % 512, *right], [-1, 0, 0, 2])
        requests = [clients[0].request(tree), clients[1].request()]
        for client, result in zip(clients, server.store.verify_batch(requests), strict=True):
            client.take(result)
    assert clients[0].tokens == PLAIN[: len(clients[0].tokens)]
    assert server.interceptor.stats()["committed_tokens"] == 12
    plain = decode_plain(MODEL, PROMPT[:6], 10).tokens
    assert clients[1].tokens == (PROMPT[:6] + plain)[: len(clients[1].tokens)]


def test_a_tree_of_tensors_is_a_tree(server: TinyHost) -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 2]
    tokens = torch.tensor([[PROMPT[-1], 7, drafts[0], drafts[1]]])
    parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32)
    tree = tree_from_parents(parents, torch.tensor([0], dtype=torch.int32), tokens)
    result = server.store.verify("a", tree, PROMPT)
    assert result.accepted_rows == [2, 3]
    assert result.tokens == drafts


@pytest.mark.parametrize(
    "of",
    [list, tuple, np.array, torch.tensor, lambda values: torch.tensor(values, dtype=torch.int16)],
)
def test_rows_of_a_tree_may_be_any_integers(server: TinyHost, of) -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 2]
    tree = SimpleNamespace(tokens=of([PROMPT[-1], 7, *drafts]), parents=of([-1, 0, 0, 2]))
    assert server.store.verify("a", tree, PROMPT).tokens == drafts


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        (torch.tensor([1.0, 2.7]), [-1, 0], "tree: got tokens of Float, expected integers"),
        ([1, 2], torch.tensor([-1.0, 0.0]), "tree: got parents of Float, expected integers"),
        (torch.tensor([True, False]), [-1, 0], "tree: got tokens of Bool, expected integers"),
        ([1, 2.5], [-1, 0], r"tree: got tokens \[1, 2.5\], expected integers"),
        ([1, np.float32(2.5)], [-1, 0], r"tree: got tokens \[.*\], expected integers"),
        ([1, 2**70], [-1, 0], r"tree: got tokens \[.*\], expected integers"),
        (7, [-1, 0], "tree: got tokens 7, expected integers"),
        ("12", [-1, 0], "tree: got tokens '12', expected integers"),
        ([1, 2], None, "tree: got parents None, expected integers"),
        (
            torch.tensor([1, 2, 3]),
            torch.tensor([-1, 0, 2**32]),
            "parents: got 4294967296 for row 2, expected an earlier row",
        ),
        ([1, 2], [2**32 - 1, 0], "parents: got 4294967295 for row 0, expected -1, the root's"),
        ([1, 2], [-1, -(2**32)], "parents: got -4294967296 for row 1, expected an earlier row"),
        (torch.ones(2, 2, dtype=torch.long), [-1, 0], "got tokens of shape .*those of one request"),
    ],
)
def test_rows_of_a_tree_are_never_changed_to_fit(
    server: TinyHost, tokens, parents, message: str
) -> None:
    with pytest.raises(NworError, match=message):
        server.store.verify("a", SimpleNamespace(tokens=tokens, parents=parents), [1])
    assert server.batches == []


def test_a_handle_remembers_the_length(server: TinyHost) -> None:
    with Session(server.store, "a") as session:
        tokens = list(PROMPT)
        for _ in range(4):
            new = tokens[session.length :]
            drafts = PLAIN[len(tokens) : len(tokens) + 2]
            result = session.verify(DraftTree([new[-1], *drafts]), new)
            tokens += [*result.tokens, result.next_token]
        assert tokens == PLAIN[: len(tokens)]
        assert session.info().length == session.length == len(tokens) - 1
        fork = session.fork("b", 5)
        session.rollback(7)
        with pytest.raises(DesyncError):
            server.store.verify(session, None, [1], 8)
        assert server.store.verify(session, None, [PLAIN[7]], 7).next_token == PLAIN[8]
        assert fork.verify(None, [PLAIN[5]]).next_token == (PROMPT + PLAIN)[6]
    assert [info.session for info in server.store.list()] == ["b"]
    fork.end()
    with pytest.raises(UnknownSessionError):
        fork.end()


def test_nothing_behind_the_end_is_cached(server: TinyHost) -> None:
    drafts = PLAIN[len(PROMPT) : len(PROMPT) + 8]
    chain = DraftTree([PROMPT[-1], *drafts])
    result = server.store.verify("a", chain, PROMPT, max_new_tokens=3)
    assert (result.finish, result.tokens, result.next_token) == ("length", drafts[:2], drafts[2])
    stop = drafts[4]
    first = drafts.index(stop)
    result = server.store.verify("b", chain, PROMPT, stop_ids=[stop], chunk_rows=2)
    assert (result.finish, result.tokens, result.next_token) == ("stop", drafts[:first], stop)
    assert server.store.info("b").length == len(PROMPT) + first
    assert server.store.verify("c", None, PROMPT).finish is None


def test_lengths_that_disagree_are_refused(server: TinyHost) -> None:
    client = Client(server, "a")
    client.verify()
    before = Metrics().snapshot()["nwor_session_desyncs_total"]
    with pytest.raises(DesyncError, match=f"got 3 for session 'a', which has {client.cached}"):
        server.store.verify("a", None, [1], 3)
    assert Metrics().snapshot()["nwor_session_desyncs_total"] == before + 1
    with pytest.raises(UnknownSessionError, match="session 'b'"):
        server.store.verify("b", None, [1], 3)
    assert server.store.info("a").length == client.cached
    client.verify()
    assert client.tokens == PLAIN[: len(client.tokens)]


def test_the_oldest_makes_room_and_says_so() -> None:
    server = TinyHost(model=MODEL, max_bytes=3 * page_bytes(MODEL))
    clients = [Client(server, name, PROMPT[:9]) for name in "abcd"]
    for client in clients:
        client.verify()
    assert [info.session for info in server.store.list()] == ["b", "c", "d"]
    assert server.store.stats()["evicted"] == 1
    assert server.store.stats()["held_bytes"] == 3 * page_bytes(MODEL)
    with pytest.raises(UnknownSessionError):
        clients[0].verify()
    with pytest.raises(CapacityError, match="expected at most"):
        Client(server, "long", [1] * 100).verify()
    assert server.store.stats()["live"] == 3


@pytest.mark.parametrize("together", [False, True])
def test_what_fits_in_no_way_evicts_nobody(together: bool) -> None:
    server = TinyHost(num_pages=24, model=MODEL)
    idle = [Client(server, name, [1] * 100) for name in "xyz"]  # seven pages each
    for client in idle:
        client.verify()
    passes = len(server.batches)
    # Its first piece would have room, and so would the first half of the batch.
    lengths = [200, 200] if together else [450]
    large = [Client(server, f"big{n}", [1] * n_tokens) for n, n_tokens in enumerate(lengths)]
    need = 26 if together else 29
    with pytest.raises(CapacityError, match=f"needs {need} pages.* at most 24 of 24"):
        server.store.verify_batch([client.request() for client in large])
    assert [info.session for info in server.store.list()] == ["x", "y", "z"]
    assert server.store.stats()["evicted"] == 0
    assert len(server.batches) == passes
    for client in idle:
        client.verify()


def test_drafts_of_passes_one_after_the_other_share_their_room() -> None:
    following = TinyHost(model=MODEL).store.verify("a", None, PROMPT[:9]).next_token
    wrong = DraftTree([PROMPT[8], *[(following + 1) % 512] * 20])
    server = TinyHost(num_pages=3, model=MODEL, max_batch=1)
    batch = [VerifyRequest(name, wrong, PROMPT[:9]) for name in "ab"]  # two pages, then one
    assert [result.length for result in server.store.verify_batch(batch)] == [9, 9]


def test_forks_in_a_batch_copy_their_shared_page_once() -> None:
    server = TinyHost(num_pages=3, model=MODEL)
    server.store.verify("a", None, [1] * 20)
    server.store.fork("a", "b")
    batch = [VerifyRequest(name, None, [2], 20) for name in "ab"]
    assert [result.length for result in server.store.verify_batch(batch)] == [21, 21]


def test_time_takes_idle_sessions() -> None:
    now = [0.0]
    server = TinyHost(model=MODEL, ttl_seconds=5, clock=lambda: now[0])
    Client(server, "a").verify()
    now[0] = 6
    assert server.store.sweep() == 1
    assert server.store.stats()["expired"] == 1
    assert server.store.list() == []


def test_what_the_model_raises_reaches_every_thread_and_changes_nothing(
    server: TinyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(server, "a")
    client.verify()
    real, entered, go = MODEL.forward, threading.Event(), threading.Event()

    def failing(*arguments):
        entered.set()
        go.wait(20)
        raise KeyError("the model's own")

    monkeypatch.setattr(MODEL, "forward", failing)
    seen: list[BaseException] = []

    def attempt(name: str) -> None:
        try:
            Client(server, name).verify()
        except BaseException as error:
            seen.append(error)

    threads = [threading.Thread(target=attempt, args=(name,)) for name in "bcd"]
    threads[0].start()
    entered.wait(20)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert [type(error) for error in seen] == [KeyError] * 3
    monkeypatch.setattr(MODEL, "forward", real)
    assert server.store.stats()["live"] == 1
    client.verify()
    assert client.tokens == PLAIN[: len(client.tokens)]


@pytest.mark.parametrize(
    ("name", "returned", "message"),
    [
        ("forward", [1, 2], "forward: got list of int, int, expected a tensor of ids or logits"),
        ("forward", 7, "forward: got int, expected a tensor of ids or logits"),
        ("forward", list(range(9)), "forward: got list of 9, expected a tensor"),
        ("accept", None, r"accept: got NoneType, expected tensors \(path, counts, next_token\)"),
        ("accept", torch.zeros(3), "accept: got Tensor, expected tensors"),
        (
            "accept",
            (torch.zeros(1, 1), [0]),
            "accept: got tuple of Tensor, list, expected tensors",
        ),
        ("accept", (torch.zeros(1), 0, None), "accept: got tuple of Tensor, int, NoneType, exp"),
        ("clock", "now", "clock: got str, expected a number of seconds"),
        ("clock", None, "clock: got NoneType, expected a number of seconds"),
    ],
)
def test_what_a_function_returns_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, returned, message: str
) -> None:
    def wrong(*arguments):
        return returned

    if name == "forward":
        monkeypatch.setattr(MODEL, "forward", wrong)
    server = TinyHost(model=MODEL, **({} if name == "forward" else {name: wrong}))
    with pytest.raises(NworError, match=f"^{message}"):
        server.store.verify("a", None, [1])
    assert server.store.stats()["live"] == 0


@pytest.mark.parametrize("name", ["accept", "clock"])
def test_what_is_no_function_is_named(name: str) -> None:
    with pytest.raises(NworError, match=f"^{name}: got int, expected a function or None"):
        TinyHost(model=MODEL, **{name: 7})


class Owner(TinyHost):
    """Its store calls back all it can, and it holds the store."""

    def __init__(self) -> None:
        super().__init__(model=MODEL, num_pages=8, accept=self.accept, clock=self.clock)

    def accept(self, batch: SessionBatch, logits: torch.Tensor):
        choices = logits.argmax(-1)[batch.tree_rows[:, 0]]
        none = torch.zeros(len(batch.sessions), dtype=torch.int32)
        return none[:, None] - 1, none, choices

    def clock(self) -> float:
        return 1.0


def test_a_store_goes_with_the_owner_of_its_functions() -> None:
    owner = Owner()
    Client(owner, "a").verify()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_a_store_that_is_held_keeps_its_functions() -> None:
    owner = Owner()
    store, there = owner.store, weakref.ref(owner)
    del owner
    gc.collect()
    assert there() is not None
    assert store.verify("a", None, PROMPT).next_token == PLAIN[len(PROMPT)]
    del store
    gc.collect()
    assert there() is None


def test_the_collector_leaves_a_store_in_use_alone() -> None:
    class Collecting(Owner):
        def accept(self, batch: SessionBatch, logits: torch.Tensor):
            gc.collect()
            return super().accept(batch, logits)

    owner = Collecting()
    gone, seen = weakref.ref(owner), []

    def verify(verify) -> None:
        seen.append(verify("a", None, PROMPT).next_token)

    thread = threading.Thread(target=verify, args=(owner.store.verify,))
    del owner
    thread.start()
    thread.join()
    assert seen == [PLAIN[len(PROMPT)]]
    del thread
    gc.collect()
    assert gone() is None


def clear(store: SessionStore) -> None:
    """What the collector does to an object of a cycle."""
    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    slot = slot_of(type(store), 51)  # Py_tp_clear
    assert slot
    assert ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(slot)(store) == 0


def test_a_store_that_was_cleared_says_so() -> None:
    class Clearing(Owner):
        def forward(self, batch: SessionBatch) -> torch.Tensor:
            clear(self.store)
            return super().forward(batch)

    owner = Clearing()
    with pytest.raises(NworError, match=r"^accept: got a call after the garbage collector cleared"):
        owner.store.verify("a", None, PROMPT)
    with pytest.raises(NworError, match=r"^clock: got a call after the garbage collector cleared"):
        owner.store.verify("a", None, PROMPT)
    assert owner.store.stats()["live"] == 0


@pytest.mark.parametrize(
    ("tree", "new_tokens", "message"),
    [
        (DraftTree([1, 2], [-1, 1]), [1], "parents: got 1 for row 1"),
        (DraftTree([1] * 257), [1], "got 257 rows, expected at most 256"),
        (DraftTree([1, 512]), [1], "tree: got token 512 at index 1, expected 0 to 511"),
        (DraftTree([2, 3]), [1], "tree: got root token 2"),
        (None, [], "new_tokens: got none"),
        (None, [-1], "new_tokens: got token -1"),
        ("tree", [1], "tree: got <class 'str'>, expected a DraftTree"),
    ],
)
def test_wrong_arguments_are_named(server: TinyHost, tree, new_tokens, message: str) -> None:
    with pytest.raises(NworError, match=message):
        server.store.verify("a", tree, new_tokens)
    with pytest.raises(NworError, match="session: got 7"):
        server.store.verify(7, None, [1])
    assert server.store.stats()["live"] == 0
    assert server.batches == []


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (DraftTree([1], [7]), "parents: got 7 for row 0, expected -1"),
        (DraftTree([1, 2], [-1]), "parents: got 1 rows, expected 2 as tokens"),
        (DraftTree([1, 2, 3], [-1, 0, 0]), "with a tree that branches, expected a chain"),
    ],
)
def test_a_chain_in_chunks_is_checked_as_any_tree(
    server: TinyHost, tree: DraftTree, message: str
) -> None:
    with pytest.raises(NworError, match=message):
        server.store.verify("a", tree, [1], 0, 4)
    assert server.batches == []


def test_an_end_comes_once(server: TinyHost) -> None:
    Client(server, "a").verify()
    server.store.end_session("a")
    with pytest.raises(UnknownSessionError, match="got 'a'"):
        server.store.end_session("a")
    with pytest.raises(UnknownSessionError, match="got 'a'"):
        server.store.info("a")
    assert server.store.stats()["held_bytes"] == 0


def test_parents_of_a_wrong_tree_are_as_given() -> None:
    tree = DraftTree([1, 2, 3], [-1])
    assert tree.parents == [-1]
    with pytest.raises(NworError, match="parents: got"):
        tree.validate()
    assert DraftTree([1, 2, 3]).parents == [-1, 0, 1]
