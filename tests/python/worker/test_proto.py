"""The generated file is that of target.proto, and everybody names the same packages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nwor_specpv.cli import doctor
from nwor_specpv.worker import rpc

ROOT = Path(__file__).resolve().parents[3]
GENERATED = Path("nwor_specpv/worker/target_pb2.py")


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="no grpcio-tools here")
def test_the_generated_file_is_that_of_the_proto(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_proto.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (made.returncode, made.stderr) == (0, "")
    expected = (tmp_path / GENERATED).read_bytes()
    assert (ROOT / "python" / GENERATED).read_bytes() == expected, (
        "run tools/generate_proto.py with the grpcio-tools of requirements/dev.txt"
    )


def test_the_generated_file_runs_with_protobuf_of_any_version() -> None:
    """Newer tools have it refuse other major versions than their own."""
    assert "runtime_version" not in (ROOT / "python" / GENERATED).read_text(encoding="utf-8")


def test_the_calls_are_those_of_the_contract() -> None:
    assert rpc.CALLS == ("VerifyDrafts", "EndSession", "Ping")
    assert rpc.messages.DESCRIPTOR.package == "nwor_specpv.v1"


def test_what_to_install_is_said_alike() -> None:
    wanted = set(re.findall(r'"([^"]+)"', rpc.INSTALL))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^worker = \[(.*)\]$", project, re.M)
    assert set(re.findall(r'"([^"]+)"', extra)) == wanted
    found = [finding for finding in doctor.examine() if finding.fix == rpc.INSTALL]
    assert {finding.name for finding in found} == {text.partition(">")[0] for text in wanted} - {
        "protobuf"
    }
    assert all(finding.ok for finding in found)
    pins = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    for name in (*(text.partition(">")[0] for text in wanted), "grpcio-tools"):
        assert re.search(rf"^{name}==", pins, re.M), name
