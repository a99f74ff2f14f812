"""TLS and tokens: who may call, what is refused before anything is sent, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nwor_specpv import Metrics, NworError
from nwor_specpv.worker import Client, Server, ServerSecurity, WorkerError, security
from nwor_specpv.worker.address import host_of
from nwor_specpv.worker.rpc import grpc
from tests.python.worker.certificates import Authority, Files
from tests.python.worker.serving import (
    LENGTH,
    NO_PROXY,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    GatedHost,
    decode,
    serving,
)

TOKEN = "correct-horse"
SHORT_S = 20.0  # of calls that fail by themselves, where gRPC keeps trying


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in vars(security).items():
        if name.endswith("_VARIABLE"):
            monkeypatch.delenv(value, raising=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "root")


@pytest.fixture(scope="module")
def files(authority: Authority) -> Files:
    return authority.issue()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def secured(files: Files, token_file: Path | None = None) -> dict[str, Any]:
    return {"security": ServerSecurity.load(files.certificate, files.key, token_file)}


def test_with_both_it_decodes_as_ever(authority: Authority, files: Files, token_file: Path) -> None:
    with (
        serving(server_options=secured(files, token_file)) as worker,
        Client(
            worker.server.address, timeout=PATIENCE_S, root_certificate=authority.root, token=TOKEN
        ) as client,
    ):
        tokens = decode(client.session("a"), PROMPT, LENGTH, 2)
    assert tokens == PLAIN[: len(tokens)]


def test_the_environment_may_have_everything(
    authority: Authority, files: Files, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(security.CERTIFICATE_VARIABLE, str(files.certificate))
    monkeypatch.setenv(security.KEY_VARIABLE, str(files.key))
    monkeypatch.setenv(security.TOKEN_FILE_VARIABLE, str(token_file))
    monkeypatch.setenv(security.ROOT_VARIABLE, str(authority.root))
    own = ServerSecurity.load()
    assert own.token == TOKEN
    monkeypatch.setenv(security.TOKEN_VARIABLE, TOKEN)  # comes before the file
    token_file.write_text("another")
    with (
        serving(server_options={"security": own}) as worker,
        Client(worker.server.address, timeout=PATIENCE_S) as client,
    ):
        assert client.ping().sessions == 0


@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x", TOKEN[:-1]])
@pytest.mark.parametrize("call", ["verify", "end", "ping"])
def test_a_wrong_token_is_refused_and_changes_nothing(token: str | None, call: str) -> None:
    before = Metrics().snapshot()["nwor_worker_calls_total"].get("unauthenticated", 0)
    own = ServerSecurity(token=TOKEN)
    with (
        serving(server_options={"security": own}) as worker,
        Client(worker.server.address, timeout=PATIENCE_S, token=token) as stranger,
        Client(worker.server.address, timeout=PATIENCE_S, token=TOKEN) as client,
    ):
        session = client.session("a")
        session.verify(None, PROMPT)
        attempt = {
            "verify": lambda: stranger.session("a").verify(None, [1], len(PROMPT)),
            "end": lambda: stranger.session("a").end(),
            "ping": stranger.ping,
        }[call]
        with pytest.raises(WorkerError, match="the bearer token is missing or wrong") as raised:
            attempt()
        assert raised.value.code == "UNAUTHENTICATED"
        assert TOKEN not in str(raised.value)
        assert worker.store.info("a").length == len(PROMPT)
        assert session.verify(None, [PLAIN[len(PROMPT)]]).next_token == PLAIN[len(PROMPT) + 1]
    counted = Metrics().snapshot()["nwor_worker_calls_total"]["unauthenticated"]
    assert counted == before + 1


def test_a_check_of_health_needs_no_token_and_the_rest_does() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    own = ServerSecurity(token=TOKEN)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    with (
        serving(server_options={"security": own}) as worker,
        grpc.insecure_channel(worker.server.address, NO_PROXY) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:  # it would hold a place
            list(health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.ServerReflectionInfo(iter([listing]), timeout=PATIENCE_S))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        (reply,) = stub.ServerReflectionInfo(iter([listing]), timeout=PATIENCE_S, metadata=metadata)
    names = {service.name for service in reply.list_services_response.service}
    assert names >= {"nwor_specpv.v1.Target", "grpc.health.v1.Health"}


def test_reflection_describes_the_calls() -> None:
    from google.protobuf import descriptor_pb2
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with (
        serving() as worker,
        grpc.insecure_channel(worker.server.address, NO_PROXY) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="nwor_specpv.v1.Target"
        )
        (reply,) = stub.ServerReflectionInfo(iter([asked]), timeout=PATIENCE_S)
    (text,) = reply.file_descriptor_response.file_descriptor_proto
    (service,) = descriptor_pb2.FileDescriptorProto.FromString(text).service
    assert [method.name for method in service.method] == ["VerifyDrafts", "EndSession", "Ping"]


@pytest.mark.parametrize("kind", ["no TLS", "another root", "another name", "TLS to a plain one"])
def test_a_connection_that_cannot_be_trusted_is_not_used(
    authority: Authority, files: Files, tmp_path: Path, kind: str
) -> None:
    options, root = secured(files), authority.root
    if kind == "no TLS":
        root = None
    elif kind == "another root":
        root = Authority(tmp_path, "stranger").root
    elif kind == "another name":
        options = secured(authority.issue("worker.example"))
    else:
        options = {}
    with (
        serving(server_options=options) as worker,
        Client(worker.server.address, timeout=SHORT_S, root_certificate=root) as client,
    ):
        with pytest.raises(WorkerError, match=r"\(with(out)? TLS\): UNAVAILABLE") as raised:
            client.ping()
        assert ("without TLS" in str(raised.value)) == (kind == "no TLS")
        assert worker.store.stats()["started"] == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "worker.example"])
def test_an_open_address_needs_both(host: str, files: Files) -> None:
    tls = ServerSecurity.load(files.certificate, files.key)
    for own, missing in (
        (ServerSecurity(), "without TLS and a token"),
        (ServerSecurity(token=TOKEN), "without TLS;"),
        (tls, "without a token;"),
    ):
        with pytest.raises(NworError, match=f"--host: got .*{missing}") as raised:
            own.check_host(host, insecure=False)
        assert "or --insecure" in str(raised.value)
        own.check_host(host, insecure=True)
    ServerSecurity(tls.certificate, tls.key, TOKEN).check_host(host, insecure=False)
    with pytest.raises(NworError, match="--host: got"):
        Server(GatedHost().store, model="m", vocab_size=512, host=host)


def test_an_open_address_is_served_if_one_insists() -> None:
    server = Server(GatedHost().store, model="m", vocab_size=512, host="0.0.0.0", insecure=True)
    with server, Client(f"127.0.0.1:{server.port}", timeout=PATIENCE_S) as client:
        assert client.ping().sessions == 0


@pytest.mark.parametrize("address", ["192.0.2.1:50051", "dns:///worker.example:50051", "h.x:1"])
def test_a_client_sends_nothing_in_the_clear_to_another_machine(
    address: str, authority: Authority
) -> None:
    for options, missing in (
        ({}, "without TLS and a token"),
        ({"token": TOKEN}, "without TLS;"),
        ({"root_certificate": authority.root}, "without a token;"),
        ({"tls": True}, "without a token;"),
    ):
        with pytest.raises(NworError, match=f"address: got .*{missing}"):
            Client(address, **options)
        Client(address, insecure=True, **options).close()
    Client(address, tls=True, token=TOKEN).close()


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:1", "127.0.0.1"),
        ("localhost:1", "localhost"),
        ("[::1]:1", "::1"),
        ("::1", "::1"),
        ("dns:///h.x:1", "h.x"),
        ("ipv4:10.0.0.1:1", "10.0.0.1"),
        ("ipv6:[fe80::1]:1", "fe80::1"),
        ("unix:/run/worker", "localhost"),
        ("h.x", "h.x"),
    ],
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_wrong_files_are_named(authority: Authority, files: Files, tmp_path: Path) -> None:
    other = authority.issue("localhost")
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.write_text("\n")
    text.write_text("no certificate")
    spaced = tmp_path / "spaced"
    spaced.write_text("two words")
    for arguments, message in (
        ((files.certificate, None), "--tls-key: got none, expected a file"),
        ((None, files.key), "--tls-certificate: got none, expected a file"),
        ((tmp_path / "none", files.key), "--tls-certificate: got .*none', which cannot be read"),
        ((text, files.key), "expected a PEM certificate and its unencrypted key"),
        ((files.certificate, other.key), "expected a PEM certificate and its unencrypted key"),
        ((None, None, tmp_path / "none"), "--token-file: got .*none', which cannot be read"),
        ((None, None, empty), "got 0 characters, expected a token"),
        ((None, None, spaced), "got 9 characters, expected a token"),
    ):
        with pytest.raises(NworError, match=message) as raised:
            ServerSecurity.load(*arguments)
        assert "\n" not in str(raised.value)
    for options, message in (
        ({"root_certificate": tmp_path / "none"}, "root_certificate: got .* cannot be read"),
        ({"root_certificate": text}, "root_certificate: got .*, expected a PEM file"),
        ({"token": ""}, "token: got 0 characters"),
        ({"token": "secret\n"}, "token: got 7 characters"),
    ):
        with pytest.raises(NworError, match=message) as raised:
            Client("127.0.0.1:1", **options)
        assert "secret" not in str(raised.value)
