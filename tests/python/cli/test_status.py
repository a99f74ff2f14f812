"""`nwor-specpv status`: the build, the machine and the hosts."""

from __future__ import annotations

import json

import pytest

from nwor_specpv import _stamp
from nwor_specpv.cli import status
from nwor_specpv.ops import attention
from tests.python.cli.commands import call, run


def shown() -> str:
    return status.describe(status.collect())


def test_json_is_one_document_and_nothing_else() -> None:
    answer = run("status", "--json")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    stamp = _stamp.read_stamp()
    assert report["ok"] is True
    assert report["problem"] is None
    assert report["build"]["revision"] == stamp.revision
    assert report["build"]["architectures"] == list(stamp.architectures)
    assert report["torch"]["version"] == stamp.torch
    assert set(report["hosts"]) == {"vllm", "transformers"}
    assert report["metrics"] == {"built": True, "url": None, "problem": None}
    assert report["server"] is None
    assert isinstance(report["devices"], list)
    assert report["routes"]["problem"] is None
    assert report["routes"]["report"]


def test_the_lines_name_the_build_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "status")
    stamp = _stamp.read_stamp()
    assert (code, err) == (0, "")
    for text in (stamp.revision, f"torch {stamp.torch}", "transformers", "metrics"):
        assert text in out
    texts = {line[len(line.split()[0]) :].strip() for line in out.splitlines()}
    width = {line.index(text) for line in out.splitlines() for text in texts if line.endswith(text)}
    assert len(width) == 1, "the texts are not aligned"


def test_attention_routes_are_shown_and_so_is_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "route_report", lambda: {"cpu": "taken"})
    assert "attention     cpu: taken" in shown()
    monkeypatch.setattr(attention, "route_report", lambda: 1 // 0)
    assert "attention     routes unknown: ZeroDivisionError: " in shown()


def test_a_gpu_without_kernels_is_pointed_out() -> None:
    report = status.collect()
    device = {"index": 0, "name": "Some GPU", "capability": "9.0", "covered": True}
    report["devices"] = [device, device | {"index": 1, "covered": False}]
    text = status.describe(report)
    assert "cuda:0        Some GPU, capability 9.0, this build has kernels for it\n" in text
    assert "cuda:1        Some GPU, capability 9.0, this build has NO kernels for it\n" in text


def test_metrics_say_whether_they_are_built_and_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "metrics       off; set metrics_port to serve them" in shown()
    native, _ = status.load_native()
    monkeypatch.setattr(native, "metrics_status", lambda: {"built": False})
    assert "metrics       not in this build; install prometheus-cpp-dev" in shown()
    monkeypatch.setattr(status, "load_native", lambda: (None, "no library"))
    assert "metrics       unknown: the native library is not loaded" in shown()


@pytest.mark.parametrize(
    ("host", "opened"),
    [
        ("localhost", "localhost"),
        ("192.0.2.1", "192.0.2.1"),
        ("::1", "[::1]"),
        ("2001:db8::7", "[2001:db8::7]"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::0", "127.0.0.1"),
        ("0:0:0:0:0:0:0:0", "127.0.0.1"),
        ("::ffff:0.0.0.0", "127.0.0.1"),
    ],
)
def test_the_configured_endpoint_is_an_address_that_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, host: str, opened: str
) -> None:
    monkeypatch.setenv("NWOR_SPECPV_METRICS_PORT", "9400")
    monkeypatch.setenv("NWOR_SPECPV_METRICS_HOST", host)
    assert status.collect()["metrics"]["url"] == f"http://{opened}:9400/metrics"


def test_wrong_settings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_SPECPV_METRICS_PROT", "9400")
    report = status.collect()
    assert "the nearest is 'NWOR_SPECPV_METRICS_PORT'" in report["metrics"]["problem"]
