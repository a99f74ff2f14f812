"""A worker that stops: health says so, every call gets an answer, and everything is counted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nwor_specpv import DraftTree, Metrics, NworError
from nwor_specpv.worker import Client, Limits, WorkerError
from nwor_specpv.worker.rpc import SERVICE_NAME, grpc, messages, stubs
from tests.python.worker.serving import (
    NO_PROXY,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    Calls,
    serving,
    until,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(channel: Any, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return stub.Check(request, timeout=PATIENCE_S).status


def test_health_says_when_the_worker_stops_and_late_calls_are_told() -> None:
    with serving() as worker, grpc.insecure_channel(worker.server.address, NO_PROXY) as channel:
        assert health_of(channel) == health_of(channel, SERVICE_NAME) == SERVING
        with pytest.raises(grpc.RpcError) as raised:
            health_of(channel, "no.such.Service")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        worker.target.gate.clear()
        runs = Calls(lambda: worker.client.session("runs").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        stop = Calls(lambda: worker.server.stop(PATIENCE_S))
        until(lambda: health_of(channel) == NOT_SERVING)
        assert health_of(channel, SERVICE_NAME) == NOT_SERVING
        with pytest.raises(WorkerError, match="the worker is stopping; send the whole") as told:
            worker.client.session("late").verify(None, PROMPT)
        assert told.value.code == "UNAVAILABLE"
        worker.target.gate.set()
        assert runs.outcomes()[0].next_token == PLAIN[len(PROMPT)]
        assert stop.outcomes() == [None]
    assert worker.target.batches == [["runs"]]


def test_a_watch_of_health_is_told_and_ends() -> None:
    with serving() as worker, grpc.insecure_channel(worker.server.address, NO_PROXY) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert next(watch).status == SERVING
        stop = Calls(worker.server.stop)
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError):
            next(watch)
        assert stop.outcomes() == [None]


def test_health_says_when_calls_can_no_longer_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as worker, grpc.insecure_channel(worker.server.address, NO_PROXY) as channel:
        broken = SimpleNamespace(info=worker.store.info, verify_batch=lambda batch: None)
        monkeypatch.setattr(worker.server._batcher, "_store", broken)
        with pytest.raises(WorkerError, match="TypeError"):
            worker.client.session("a").verify(None, PROMPT)
        until(lambda: health_of(channel) == NOT_SERVING)


def test_a_pass_that_outlasts_the_grace_is_unavailable() -> None:
    with serving() as worker:
        worker.target.gate.clear()
        runs = Calls(lambda: worker.client.session("runs").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        stop = Calls(lambda: worker.server.stop(0))
        (error,) = runs.outcomes()
        assert isinstance(error, WorkerError)
        assert error.code == "UNAVAILABLE"
        assert "stopped before the pass of this call ended" in str(error)
        worker.target.gate.set()
        assert stop.outcomes() == [None]


def test_every_call_gets_an_answer_when_the_worker_stops_among_many() -> None:
    """Clients call without a pause, before, while and after the worker stops."""
    stopped = threading.Event()

    def call_on(index: int) -> tuple[int, set[str]]:
        answered, codes = 0, set()
        with Client(worker.server.address, timeout=PATIENCE_S) as client:
            while not (stopped.is_set() and codes):
                try:
                    client.session(f"s{index}-{answered}").verify(None, PROMPT[:3])
                    answered += 1
                except WorkerError as error:
                    codes.add(error.code)
        return answered, codes

    with serving() as worker:
        calls = Calls(*(lambda index=index: call_on(index) for index in range(8)))
        until(lambda: len(worker.target.batches) > 20)
        worker.server.stop()
        stopped.set()
        outcomes = calls.outcomes()
    assert [codes for _, codes in outcomes] == [{"UNAVAILABLE"}] * 8
    # What was run was answered.
    assert sum(map(len, worker.target.batches)) == sum(answered for answered, _ in outcomes)


def counted() -> dict[str, Any]:
    snapshot = Metrics().snapshot()
    found = {key: value for key, value in snapshot.items() if key.startswith("nwor_worker_")}
    return found | {"calls": found.pop("nwor_worker_calls_total")}


def test_calls_bytes_and_time_are_counted() -> None:
    request = messages.VerifyDraftsRequest(session="a", new_tokens=PROMPT)
    with (
        serving(Limits(max_calls=1)) as worker,
        grpc.insecure_channel(worker.server.address, NO_PROXY) as channel,
    ):
        calls = stubs(channel)
        before = counted()
        reply = calls["VerifyDrafts"](request, timeout=PATIENCE_S)
        after = counted()
        assert _grown(before, after, "answered") == 1
        for name, size in (("received", request), ("sent", reply)):
            key = f"nwor_worker_bytes_{name}_total"
            assert after[key] - before[key] == size.ByteSize()
        key = "nwor_worker_call_seconds_total"
        assert after[key] - before[key] >= (reply.wait_us + reply.run_us) * 1e-6 - 1e-6

        with pytest.raises(NworError):
            worker.client.session("a").verify(None, [1], 3)
        worker.target.gate.clear()
        worker.target.entered.clear()
        held = Calls(lambda: worker.client.session("b").verify(None, PROMPT))
        assert worker.target.entered.wait(PATIENCE_S)
        with pytest.raises(NworError):
            worker.client.session("c").verify(None, PROMPT)
        worker.target.failure = lambda batch: RuntimeError("broken")
        worker.target.gate.set()
        held.outcomes()
        worker.target.failure = lambda batch: None
        worker.target.gate.clear()
        worker.target.entered.clear()
        call = calls["VerifyDrafts"].future(
            messages.VerifyDraftsRequest(session="d", new_tokens=PROMPT), timeout=PATIENCE_S
        )
        assert worker.target.entered.wait(PATIENCE_S)
        call.cancel()
        until(lambda: _grown(before, counted(), "abandoned") == 1)
        worker.target.gate.set()
        worker.server.stop()
        after = counted()
    expected = {"answered": 1, "refused": 1, "busy": 1, "failed": 1, "abandoned": 1}
    assert {name: _grown(before, after, name) for name in expected} == expected


def _grown(before: dict[str, Any], after: dict[str, Any], outcome: str) -> int:
    return after["calls"].get(outcome, 0) - before["calls"].get(outcome, 0)


def test_more_distributions_than_the_limits_allow_are_refused() -> None:
    limits = Limits(max_distribution_bytes=100)
    options = {"temperature": 1.0, "draft_log_probs": [{1: 0.0}] * 20}
    with serving(limits) as worker:
        with pytest.raises(NworError, match=r"distributions: got \d+ bytes, expected at most 100"):
            worker.client.session("a").verify(DraftTree([PROMPT[-1], *[1] * 20]), PROMPT, **options)
        assert worker.client.ping().sessions == 0
