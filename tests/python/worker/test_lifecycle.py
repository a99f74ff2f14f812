"""Calls that are given up, sessions that end meanwhile, servers that stop."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv import NworError, UnknownSessionError, __version__
from nwor_specpv.worker import Client, Limits, Server, WorkerError
from nwor_specpv.worker.address import check_address
from nwor_specpv.worker.rpc import grpc, messages, stubs
from tests.python.worker.serving import (
    MODEL,
    NO_PROXY,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    Calls,
    GatedHost,
    serving,
    until,
)


def test_ping_tells_what_there_is() -> None:
    with serving(Limits(max_tree_rows=9, max_prompt_tokens=99)) as worker:
        info = worker.client.ping(wait=True)
        assert (info.version, info.model, info.vocab_size) == (__version__, "stories260K", 512)
        assert (info.max_tree_rows, info.max_prompt_tokens) == (9, 99)
        assert (info.sessions, info.held_bytes, info.waiting) == (0, 0, 0)
        worker.client.session("a").verify(None, PROMPT)
        info = worker.client.ping()
        assert info.sessions == 1
        assert 0 < info.held_bytes < info.max_bytes


class BrokenError(grpc.RpcError):
    """What gRPC says of a call whose connection ended."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "Stream removed"


def test_a_ping_that_waits_asks_again_where_a_connection_breaks() -> None:
    with serving() as worker:
        asks, times = worker.client._calls["Ping"], []

        def broken(request: Any, **options: Any) -> Any:
            times.append(options["timeout"])
            if len(times) % 3:
                raise BrokenError
            return asks(request, **options)

        worker.client._calls["Ping"] = broken
        assert worker.client.ping(wait=True).model == "stories260K"
        assert len(times) == 3
        assert PATIENCE_S >= times[0] > times[1] > times[2]
        with pytest.raises(WorkerError, match="UNAVAILABLE: Stream removed"):
            worker.client.ping()
        worker.client.timeout = 0.15
        times.clear()
        with pytest.raises(WorkerError, match="UNAVAILABLE: Stream removed"):
            worker.client.ping(wait=True)
        assert len(times) == 2


def test_a_call_that_is_cancelled_before_its_turn_is_left_out() -> None:
    with serving() as worker, grpc.insecure_channel(worker.server.address, NO_PROXY) as channel:
        worker.target.gate.clear()
        busy = Calls(lambda: worker.client.session("busy").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        request = messages.VerifyDraftsRequest(session="gone", new_tokens=PROMPT)
        call = stubs(channel)["VerifyDrafts"].future(request, timeout=PATIENCE_S)
        stays = Calls(lambda: worker.client.session("stays").verify(None, PROMPT))
        worker.until_waiting(2)
        call.cancel()
        worker.until_waiting(1)
        worker.target.gate.set()
        assert busy.outcomes()[0].next_token == stays.outcomes()[0].next_token
        assert worker.target.batches == [["busy"], ["stays"]]
        assert worker.client.ping().sessions == 2


def test_a_call_whose_time_is_up_before_its_turn_is_left_out() -> None:
    with serving() as worker, Client(worker.server.address, timeout=0.5) as hasty:
        worker.target.gate.clear()
        busy = Calls(lambda: worker.client.session("busy").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        with pytest.raises(WorkerError) as raised:
            hasty.session("late").verify(None, PROMPT)
        assert raised.value.code == "DEADLINE_EXCEEDED"
        worker.until_waiting(0)
        worker.target.gate.set()
        busy.outcomes()
        assert worker.client.session("next").verify(None, PROMPT).length == len(PROMPT)
        assert worker.target.batches == [["busy"], ["next"]]


def test_a_client_that_gave_up_in_the_middle_sends_again() -> None:
    """What it does not know of was accepted: nothing is rebuilt unless it says so."""
    with serving() as worker:
        client = Client(worker.server.address, timeout=PATIENCE_S)
        session = client.session("a", resend=True)
        session.verify(None, PROMPT)
        worker.target.gate.clear()
        worker.target.entered.clear()
        call = Calls(lambda: session.verify(None, [PLAIN[len(PROMPT)]]))
        assert worker.target.entered.wait(PATIENCE_S)
        client.close()
        (error,) = call.outcomes()
        assert isinstance(error, WorkerError)
        assert error.code == "CANCELLED"
        worker.target.gate.set()
        until(lambda: worker.store.info("a").length == len(PROMPT) + 1)
        with pytest.raises(NworError, match="was called after close"):
            session.verify(None, [PLAIN[len(PROMPT)]])
        session.client = worker.client
        result = session.verify(None, [PLAIN[len(PROMPT)]])
        assert (result.cache_hit, result.length) == (False, len(PROMPT) + 1)
        assert result.next_token == PLAIN[len(PROMPT) + 1]


def test_an_end_waits_for_the_verify_in_flight() -> None:
    with serving() as worker:
        session = worker.client.session("a")
        worker.target.gate.clear()
        verify = Calls(lambda: session.verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        ended = threading.Event()

        def end() -> None:
            worker.client.session("a").end()
            ended.set()

        end_call = Calls(end)
        assert worker.client.ping().sessions == 1  # answers meanwhile
        assert not ended.is_set()
        worker.target.gate.set()
        assert verify.outcomes()[0].next_token == PLAIN[len(PROMPT)]
        assert end_call.outcomes() == [None]
        assert worker.client.ping().sessions == 0
        with pytest.raises(UnknownSessionError):
            session.verify(None, [PLAIN[len(PROMPT)]])


def test_an_idle_server_takes_idle_sessions_away() -> None:
    now = [0.0]
    with serving(ttl_seconds=5, clock=lambda: now[0], sweep_seconds=0.01) as worker:
        worker.client.session("a").verify(None, PROMPT)
        assert worker.client.ping().sessions == 1
        now[0] = 6.0
        until(lambda: worker.client.ping().sessions == 0)
        assert worker.store.stats()["expired"] == 1


def test_a_sweep_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    now: list[Any] = [0.0]
    with serving(ttl_seconds=5, clock=lambda: now[0], sweep_seconds=0.01) as worker:
        worker.client.session("a").verify(None, PROMPT)
        now[0] = "noon"
        until(lambda: any("could not end idle sessions" in r.message for r in caplog.records))
        now[0] = 1.0
        assert worker.client.session("b").verify(None, PROMPT).length == len(PROMPT)


def test_a_sweep_may_be_later_than_any_clock_tells() -> None:
    with serving(sweep_seconds=1e300) as worker:
        assert worker.client.session("a").verify(None, PROMPT).length == len(PROMPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch: got 0, expected 1 or more"),
        ({"sweep_seconds": 0.0}, "sweep_seconds: got 0.0, expected more than 0, or None"),
        ({"sweep_seconds": float("nan")}, "sweep_seconds: got nan, expected more than 0"),
    ],
)
def test_a_server_that_would_answer_nobody_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(NworError, match=message):
        Server(GatedHost().store, model="m", vocab_size=512, **options)


def test_a_session_that_cannot_be_looked_at_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as worker:
        store = worker.store

        def info(name: str) -> Any:
            if name == "bad":
                raise RuntimeError("cannot be looked at")
            return store.info(name)

        broken = SimpleNamespace(info=info, verify_batch=store.verify_batch)
        monkeypatch.setattr(worker.server._batcher, "_store", broken)
        worker.target.failure = lambda batch: (
            RuntimeError("broken") if "bad" in batch.sessions else None
        )
        with pytest.raises(WorkerError, match="RuntimeError: broken") as raised:
            worker.client.session("bad").verify(None, PROMPT)
        assert raised.value.code == "INTERNAL"
        assert worker.client.session("good").verify(None, PROMPT).length == len(PROMPT)


def test_a_thread_that_ends_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as worker:
        worker.target.gate.clear()
        runs = Calls(lambda: worker.client.session("runs").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        # Of one session, so the second is still waiting when the first is run.
        others = Calls(*[lambda: worker.client.session("other").verify(None, PROMPT)] * 2)
        worker.until_waiting(2)
        broken = SimpleNamespace(info=worker.store.info, verify_batch=lambda batch: None)
        monkeypatch.setattr(worker.server._batcher, "_store", broken)
        worker.target.gate.set()
        assert runs.outcomes()[0].length == len(PROMPT)  # its pass had begun
        for error in others.outcomes():
            assert isinstance(error, WorkerError)
            assert error.code == "INTERNAL"
            assert "TypeError: 'NoneType' object" in str(error)
        for call in (
            lambda: worker.client.session("later").verify(None, PROMPT),
            worker.client.ping,
        ):
            with pytest.raises(WorkerError, match="its log has more") as raised:
                call()
            assert raised.value.code == "UNAVAILABLE"
    assert sum("calls can no longer be run" in record.message for record in caplog.records) == 1


def test_a_server_that_stops_answers_what_runs_and_refuses_what_waits() -> None:
    with serving() as worker:
        worker.target.gate.clear()
        runs = Calls(lambda: worker.client.session("runs").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        waits = Calls(lambda: worker.client.session("waits").verify(None, PROMPT))
        worker.until_waiting(1)
        stop = Calls(lambda: worker.server.stop(PATIENCE_S))
        (refused,) = waits.outcomes()  # before the pass ends
        assert isinstance(refused, WorkerError)
        assert refused.code == "UNAVAILABLE"
        worker.target.gate.set()
        assert runs.outcomes()[0].next_token == PLAIN[len(PROMPT)]
        assert stop.outcomes() == [None]
        with pytest.raises(WorkerError) as raised:
            worker.client.ping()
        assert raised.value.code == "UNAVAILABLE"
        assert worker.target.batches == [["runs"]]


def test_a_pass_that_outlasts_the_grace_is_told_to_its_client() -> None:
    with serving() as worker:
        worker.target.gate.clear()
        runs = Calls(lambda: worker.client.session("runs").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        stop = Calls(lambda: worker.server.stop(0))
        (error,) = runs.outcomes()
        assert isinstance(error, WorkerError)
        assert error.code in ("UNAVAILABLE", "CANCELLED")
        worker.target.gate.set()
        assert stop.outcomes() == [None]


def test_a_name_may_have_addresses_that_this_machine_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, stream = ("127.0.0.1", 0), socket.SOCK_STREAM
    other = (socket.AF_INET, stream, 0, "", ("192.0.2.1", 0))  # of no machine
    found = [other, (socket.AF_INET, stream, 0, "", own)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    check_address("somewhere", 0)
    found.pop()
    with pytest.raises(NworError, match=r"cannot listen at somewhere:0: Cannot assign"):
        check_address("somewhere", 0)


def test_a_port_that_is_taken_is_told() -> None:
    with serving() as worker:
        target = GatedHost()
        with pytest.raises(NworError, match=f"cannot listen at 127.0.0.1:{worker.server.port}: "):
            Server(
                target.store,
                model="other",
                vocab_size=MODEL.shape.vocabulary,
                port=worker.server.port,
            )
    with pytest.raises(NworError, match=r"no\.such\.host"):
        Server(target.store, model="other", vocab_size=512, host="no.such.host.invalid")


def test_a_server_that_was_never_started_stops() -> None:
    Server(GatedHost().store, model="m", vocab_size=512).stop()


def test_a_server_starts_once() -> None:
    server = Server(GatedHost().store, model="m", vocab_size=512)
    with server:
        with pytest.raises(NworError, match="start: this server was started or stopped before"):
            server.start()
        with Client(server.address, timeout=PATIENCE_S) as client:
            assert client.session("a").verify(None, PROMPT).length == len(PROMPT)
    with pytest.raises(NworError, match="start: this server was started or stopped before"):
        server.start()
    assert not [t for t in threading.enumerate() if t.name == "nwor-worker"]
