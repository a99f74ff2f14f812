"""What a client is told: the project's errors, with numbers, and nobody else's."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from unittest import mock
from urllib.parse import quote

import pytest

from nwor_specpv import (
    CapacityError,
    DesyncError,
    DraftTree,
    Metrics,
    NworError,
    UnknownSessionError,
)
from nwor_specpv.worker import Client, Limits, WorkerError, server
from nwor_specpv.worker.rpc import grpc, messages, stubs
from tests.python.session.tiny_host import page_bytes
from tests.python.worker.serving import (
    LENGTH,
    MODEL,
    NO_PROXY,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    Calls,
    decode,
    serving,
    until,
)


def status(address: str, call: str, request: object) -> tuple[str, str]:
    """As any gRPC client sees it."""
    with grpc.insecure_channel(address, NO_PROXY) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            stubs(channel)[call](request, timeout=PATIENCE_S)
        return raised.value.code().name, raised.value.details()


def test_lengths_that_disagree_name_both() -> None:
    desyncs = Metrics().snapshot()["nwor_session_desyncs_total"]
    with serving() as worker:
        session = worker.client.session("a")
        session.verify(None, PROMPT)
        with pytest.raises(DesyncError, match=f"got 3 for session 'a', which has {len(PROMPT)} "):
            session.verify(None, [1], 3)
        assert session.length == len(PROMPT)
        assert session.verify(None, [PLAIN[len(PROMPT)]]).next_token == PLAIN[len(PROMPT) + 1]
        request = messages.VerifyDraftsRequest(session="a", new_tokens=[1], expected_prefix_len=2)
        code, told = status(worker.server.address, "VerifyDrafts", request)
        assert code == "FAILED_PRECONDITION"
        assert f"got 2 for session 'a', which has {len(PROMPT) + 1} tokens cached" in told
    assert Metrics().snapshot()["nwor_session_desyncs_total"] == desyncs + 2


def test_a_session_that_is_not_here() -> None:
    with serving() as worker:
        with pytest.raises(UnknownSessionError, match="session 'a': got expected_prefix_len 3"):
            worker.client.session("a").verify(None, [1], 3)
        session = worker.client.session("b")
        session.verify(None, PROMPT)
        session.end()
        assert session.length == 0
        with pytest.raises(UnknownSessionError, match="got 'b'"):
            session.end()
        request = messages.EndSessionRequest(session="b")
        assert status(worker.server.address, "EndSession", request)[0] == "NOT_FOUND"


def test_a_session_that_made_room_is_sent_again() -> None:
    with serving(max_bytes=2 * page_bytes(MODEL)) as worker:
        text = PROMPT[:9]
        kept = worker.client.session("kept", resend=True)
        lost = worker.client.session("lost")
        for session in (kept, lost):
            session.verify(None, text)
        for name in "xy":
            worker.client.session(name).verify(None, text)
        assert worker.store.stats()["evicted"] == 2
        with pytest.raises(UnknownSessionError):
            lost.verify(None, [PROMPT[9]])
        result = kept.verify(None, [PROMPT[9]])
        assert (result.cache_hit, result.length) == (False, 10)


@pytest.mark.parametrize("ended", [False, True])
def test_a_session_that_went_wrong_is_sent_again_and_decodes_on(ended: bool) -> None:
    with serving() as worker:
        session = worker.client.session("a", resend=True)
        tokens = decode(session, PROMPT, LENGTH // 2, 2)
        if ended:
            worker.store.end_session("a")
        else:
            worker.store.rollback("a", 5)
        result = session.verify(None, tokens[session.length :])
        assert not result.cache_hit
        tokens = decode(session, [*tokens, result.next_token], LENGTH // 2, 3)
        assert tokens == PLAIN[: len(tokens)]
        # The caller says what is cached, so this is what the sequence becomes.
        result = session.verify(None, [PLAIN[7]], 7)
        assert (result.length, result.next_token) == (8, PLAIN[8])
        with pytest.raises(DesyncError):  # more than is known here
            session.verify(None, [1], 100)
        session.end()
        assert session.verify(None, PROMPT).length == len(PROMPT)


def test_a_session_that_is_gone_when_it_is_ended_starts_anew() -> None:
    with serving() as worker:
        session = worker.client.session("a", resend=True)
        session.verify(None, PROMPT)
        worker.store.end_session("a")
        with pytest.raises(UnknownSessionError):
            session.end()
        assert session.length == 0
        assert session.verify(None, PROMPT[:5]).length == 5
        with session:
            worker.store.end_session("a")
        assert session.verify(None, PROMPT[:4]).length == 4


def test_what_came_before_a_session_was_met_is_not_sent_again() -> None:
    """Another has started it: its first tokens are not known here, nor made of later ones."""
    first = len(PROMPT)
    with serving() as worker:
        worker.client.session("a").verify(None, PROMPT)
        session = worker.client.session("a", resend=True)
        session.verify(None, [PLAIN[first]], first)
        for token in PLAIN[first + 1 : first + 6]:
            session.verify(None, [token])
        with pytest.raises(DesyncError):
            session.verify(None, [PLAIN[4]], 4)
        assert worker.store.info("a").length == session.length == first + 6
        session.end()  # what comes now is known from its first token on
        session.verify(None, PROMPT)
        worker.store.end_session("a")
        assert session.verify(None, [PLAIN[first]]).next_token == PLAIN[first + 1]


def test_the_second_error_of_a_session_sent_again_is_raised() -> None:
    with serving(Limits(max_prompt_tokens=len(PROMPT))) as worker:
        session = worker.client.session("a", resend=True)
        tokens = decode(session, PROMPT, 4, 0)
        worker.store.end_session("a")
        with pytest.raises(NworError, match=f"got {len(tokens)} tokens, expected at most"):
            session.verify(None, tokens[session.length :])


def test_what_does_not_fit_is_told() -> None:
    with serving(max_bytes=3 * page_bytes(MODEL)) as worker:
        with pytest.raises(CapacityError, match=r"needs \d+ pages"):
            worker.client.session("a").verify(None, [1] * 100)
        request = messages.VerifyDraftsRequest(session="a", new_tokens=[1] * 100)
        code, _ = status(worker.server.address, "VerifyDrafts", request)
        assert code == "RESOURCE_EXHAUSTED"
        assert worker.client.ping().sessions == 0


def test_more_calls_than_the_server_takes_are_refused() -> None:
    with serving(Limits(max_calls=1)) as worker:
        worker.client.session("other").verify(None, PROMPT)
        worker.target.gate.clear()
        worker.target.entered.clear()
        held = Calls(lambda: worker.client.session("a").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        with pytest.raises(CapacityError, match="VerifyDrafts: got more than 1 call at once"):
            worker.client.session("b").verify(None, PROMPT)
        worker.client.session("other").end()
        assert worker.client.ping().sessions == 1
        worker.target.gate.set()
        assert held.outcomes()[0].next_token == PLAIN[len(PROMPT)]
        assert worker.client.session("b").verify(None, PROMPT).length == len(PROMPT)


def test_ends_that_wait_leave_room_for_a_ping() -> None:
    with serving(Limits(max_calls=2)) as worker:
        worker.target.gate.clear()
        held = Calls(lambda: worker.client.session("a").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        ends = Calls(*[worker.client.session("a").end] * 12)
        until(lambda: sum(outcome is not None for outcome in ends.so_far) >= 10)
        assert worker.client.ping().sessions == 1
        worker.target.gate.set()
        held.outcomes()
        outcomes = ends.outcomes()
    refused = [error for error in outcomes if isinstance(error, CapacityError)]
    assert len(refused) == 10
    assert "EndSession: got more than 2 calls at once" in str(refused[0])
    assert sum(outcome is None for outcome in outcomes) == 1


@pytest.mark.parametrize(
    ("tree", "new_tokens", "options", "message"),
    [
        (DraftTree([1] * 9), [1], {}, "tree: got 9 rows, expected at most 8"),
        (None, [1] * 33, {}, "new_tokens: got 33 tokens, expected at most 32"),
        (None, [1], {"stop_ids": [1] * 257}, "stop_ids: got 257 tokens, expected at most 256"),
        (DraftTree([1, 2], [-1, 1]), [1], {}, "parents: got 1 for row 1"),
        (DraftTree([1, 2, 3], [-1, 0]), [1], {}, "parents: got 2 rows, expected 3"),
        (DraftTree([1, 2], [0, 0]), [1], {}, "parents: got 0 for row 0, expected -1"),
        (DraftTree([1, 512]), [1], {}, "tree: got token 512 at index 1, expected 0 to 511"),
        (DraftTree([2, 3]), [1], {}, "tree: got root token 2"),
        (None, [], {}, "new_tokens: got none"),
        (None, [-1], {}, "new_tokens: got token -1"),
        (None, [1], {"expected_prefix_len": -1}, "expected_prefix_len: got -1"),
        (None, [1], {"chunk_rows": 257}, "chunk_rows: got 257"),
        (None, [1], {"max_new_tokens": -2}, "max_new_tokens: got -2"),
        (DraftTree([1, 2, 3], [-1, 0, 0]), [1], {"chunk_rows": 2}, "a tree that branches"),
        # Refused before they are sent.
        ("tree", [1], {}, "tree: got str, expected a DraftTree"),
        (None, [1.5], {}, "new_tokens: got 1.5, expected integers"),
        (None, [True], {}, "new_tokens: got True, expected integers"),
        (None, 7, {}, "new_tokens: got 7, expected integers"),
        (None, [2**70], {}, "a value does not fit the message"),
        (
            SimpleNamespace(tokens=[1, 2], parents=[-1, 2**40]),
            [1],
            {},
            "a value does not fit the message",
        ),
        (SimpleNamespace(tokens=[1, 2], parents=None), [1], {}, "parents: got None, expected int"),
    ],
)
def test_wrong_arguments_are_named(tree, new_tokens, options, message: str) -> None:
    with serving(Limits(max_tree_rows=8, max_prompt_tokens=32)) as worker:
        with pytest.raises(NworError, match=message) as raised:
            worker.client.session("a").verify(tree, new_tokens, **options)
        assert type(raised.value) is NworError
        assert worker.target.batches == []
        assert worker.client.ping().sessions == 0


def test_names_are_limited() -> None:
    with serving() as worker:
        with pytest.raises(NworError, match="session: got an empty name"):
            worker.client.session("").verify(None, PROMPT)
        with pytest.raises(NworError, match="session: got 257 characters, expected at most 256"):
            worker.client.session("n" * 257).verify(None, PROMPT)
        with pytest.raises(NworError, match="session: got 257 characters, expected at most 256"):
            worker.client.session("n" * 257).end()
        assert worker.client.session("ä" * 256).verify(None, PROMPT).length == len(PROMPT)


def test_a_message_larger_than_the_limits_allow_is_not_read() -> None:
    limits = Limits(max_tree_rows=4, max_prompt_tokens=4, max_distribution_bytes=0)
    request = messages.VerifyDraftsRequest(session="a", new_tokens=[1] * (limits.message_bytes + 1))
    with serving(limits) as worker:
        code, told = status(worker.server.address, "VerifyDrafts", request)
        assert code == "RESOURCE_EXHAUSTED"
        assert str(limits.message_bytes) in told
        assert worker.client.session("a").verify(None, [1]).length == 1


def test_the_largest_call_within_the_limits_fits() -> None:
    limits = Limits(max_tree_rows=256, max_prompt_tokens=1000)
    request = messages.VerifyDraftsRequest(
        session="\N{GRINNING FACE}" * 256,
        tree=messages.DraftTree(tokens=[-1] * 256, parents=[-(2**31)] * 256),
        new_tokens=[-1] * 1000,
        expected_prefix_len=-1,
        chunk_rows=-1,
        stop_ids=[-1] * 256,
        max_new_tokens=-1,
        sampling=messages.Sampling(temperature=1.5, top_k=-1, top_p=0.5, seed=-1),
        distributions=messages.DraftDistributions(probs=b"p" * ((16 << 20) - 5)),
        want_token_bytes=True,
    )
    limits.check(request)
    assert request.ByteSize() <= limits.message_bytes


@pytest.mark.parametrize("name", ["max_tree_rows", "max_prompt_tokens"])
def test_limits_are_those_that_a_message_can_have(name: str) -> None:
    with pytest.raises(NworError, match=rf"{name}.* 300000000.* at most {2**31 - 1}"):
        Limits(**{name: 300_000_000})
    assert Limits(max_prompt_tokens=200_000_000).message_bytes < 2**31


def test_a_limit_on_distributions_may_be_none() -> None:
    assert Limits(max_distribution_bytes=0).max_distribution_bytes == 0
    with pytest.raises(NworError, match="max_distribution_bytes: got -1, expected 0 or more"):
        Limits(max_distribution_bytes=-1)


@pytest.mark.parametrize("name", ["max_tree_rows", "max_prompt_tokens", "max_calls"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(NworError, match=f"{name}: got 0, expected 1 or more"):
        Limits(**{name: 0})


@pytest.mark.parametrize("character", ["a", "%", "\N{GREEK SMALL LETTER ALPHA}", "\U0001f600"])
def test_a_long_message_is_cut_to_what_a_header_holds(character: str) -> None:
    with serving() as worker:
        worker.target.failure = lambda batch: RuntimeError(character * 100_000)
        request = messages.VerifyDraftsRequest(session="a", new_tokens=PROMPT)
        code, told = status(worker.server.address, "VerifyDrafts", request)
    assert code == "INTERNAL"
    assert f"RuntimeError: {character * 400}" in told
    assert len(quote(told, safe="").encode()) <= 6100


def test_a_message_that_no_header_holds_is_told_as_far_as_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nor do pytest's processes hand it on, so it is not to be in what they have captured.
    monkeypatch.setattr(server, "logger", mock.Mock())
    with serving() as worker:
        worker.target.failure = lambda batch: RuntimeError("file \udcff is broken")
        with pytest.raises(WorkerError, match=r"RuntimeError: file \? is broken"):
            worker.client.session("a").verify(None, PROMPT)


def test_one_bad_call_of_a_batch_fails_alone() -> None:
    good = [f"g{index}" for index in range(4)]
    with serving() as worker:
        worker.client.session("known").verify(None, PROMPT)
        worker.target.gate.clear()
        worker.target.entered.clear()
        busy = Calls(lambda: worker.client.session("busy").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        session = worker.client.session
        calls = Calls(
            *(lambda name=name: session(name).verify(None, PROMPT) for name in good),
            lambda: session("known").verify(None, [1], 3),
            lambda: session("unknown").verify(None, [1], 3),
            lambda: session("wrong").verify(None, [512]),
        )
        worker.until_waiting(7)
        before = worker.store.stats()
        worker.target.gate.set()
        outcomes = calls.outcomes()
        busy.outcomes()
        after = worker.store.stats()
    assert [result.next_token for result in outcomes[:4]] == [PLAIN[len(PROMPT)]] * 4
    assert [type(error) for error in outcomes[4:]] == [DesyncError, UnknownSessionError, NworError]
    assert after["desyncs"] == before["desyncs"] + 1
    # The good ones stay together as far as the one of them that nobody could foresee lets them.
    assert len(worker.target.batches) < 2 + len(good)


def test_what_the_model_raises_is_told_and_logged_and_the_worker_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as worker:
        session = worker.client.session("a")
        session.verify(None, PROMPT)
        worker.target.failure = lambda batch: KeyError("the model's own")
        with (
            caplog.at_level(logging.ERROR, "nwor_specpv"),
            pytest.raises(WorkerError, match=r"KeyError: .the model's own") as raised,
        ):
            session.verify(None, [PLAIN[len(PROMPT)]])
        assert raised.value.code == "INTERNAL"
        assert ["VerifyDrafts failed" in record.message for record in caplog.records] == [True]
        worker.target.failure = lambda batch: None
        assert session.length == len(PROMPT)
        assert session.verify(None, [PLAIN[len(PROMPT)]]).next_token == PLAIN[len(PROMPT) + 1]


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3), KeyboardInterrupt()])
def test_a_model_that_breaks_on_one_session_spares_the_others(error: BaseException) -> None:
    with serving() as worker:
        worker.target.gate.clear()
        worker.target.failure = lambda batch: error if "bad" in batch.sessions else None
        busy = Calls(lambda: worker.client.session("busy").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        names = ["a", "bad", "c"]
        calls = Calls(
            *(lambda name=name: worker.client.session(name).verify(None, PROMPT) for name in names)
        )
        worker.until_waiting(3)
        worker.target.gate.set()
        busy.outcomes()
        first, failed, last = calls.outcomes()
        assert first.next_token == last.next_token == PLAIN[len(PROMPT)]
        assert isinstance(failed, WorkerError)
        assert failed.code == "INTERNAL"
        assert worker.client.ping().sessions == 3


def test_no_worker_there() -> None:
    with serving() as worker:
        address = worker.server.address
    with Client(address, timeout=PATIENCE_S) as client:
        with pytest.raises(WorkerError, match=address) as raised:
            client.ping()
        assert raised.value.code == "UNAVAILABLE"
        with pytest.raises(ZeroDivisionError), client.session("a"):  # not what leaving it raises
            raise ZeroDivisionError


@pytest.mark.parametrize("reason", ["closed", "refused"])
def test_what_leaving_a_session_raises_hides_no_error(reason: str) -> None:
    with serving() as worker, Client(worker.server.address, timeout=PATIENCE_S) as client:
        if reason == "closed":
            client.close()
        name = "a" if reason == "closed" else "a" * 257
        with pytest.raises(NworError), client.session(name):  # nothing else to be seen
            pass
        with pytest.raises(ZeroDivisionError), client.session(name):
            raise ZeroDivisionError


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("-inf"), 1e10, 1e300])
def test_a_timeout_that_no_call_can_have_is_refused(timeout: float) -> None:
    with pytest.raises(NworError, match=f"timeout: got {re.escape(str(timeout))}, expected"):
        Client("127.0.0.1:1", timeout=timeout)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_keepalive_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(NworError, match=f"keepalive_seconds: got {seconds}, expected 1 to 86400"):
        Client("127.0.0.1:1", keepalive_seconds=seconds)


@pytest.mark.parametrize("timeout", [1e9, float("inf"), None])
def test_a_timeout_may_be_long(timeout: float | None) -> None:
    with serving() as worker, Client(worker.server.address, timeout=timeout) as client:
        assert client.ping().sessions == 0
