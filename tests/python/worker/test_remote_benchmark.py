"""The benchmark of remote drafters: a run from end to end with the story model, and its check."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nwor_specpv.models import stories
from nwor_specpv.worker import Client
from tests.python.worker.serving import serving
from tests.python.worker.test_token_bytes import byte_level

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "worker_remote.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("worker_remote", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_way_is_measured_and_writes_the_same(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stories(progress=lambda *_: None, destination=tmp_path / "stories")
    byte_level().save_pretrained(folder)
    result = tmp_path / "result.json"
    arguments = f"--model {folder} --threads 1 --tokens 12 --prompts 1 --rows 4 --latency-ms 1"
    monkeypatch.setattr(
        sys, "argv", ["worker_remote.py", *arguments.split(), "--json", str(result)]
    )
    assert program.main() == 0
    report = json.loads(result.read_text())
    assert [one["way"] for one in report["ways"]] == [
        "local, no drafts",
        "local, ngram",
        "remote, 0 ms, no drafts",
        "remote, 0 ms, ngram, 4 rows",
        "remote, 1 ms, no drafts",
        "remote, 1 ms, ngram, 4 rows",
    ]
    for one in report["ways"]:
        assert one["same_tokens"]
        assert one["tokens"] == 12
        assert one["tokens_per_second"] == one["tokens"] / one["seconds"]
    plain = [one for one in report["ways"] if one["way"].endswith("no drafts")]
    assert [one["tokens_per_call"] for one in plain] == [1, 1, 1]
    assert report["machine"]["device"].startswith("CPU")


def test_other_tokens_are_found(program: ModuleType) -> None:
    def way(tokens: list[int]) -> Any:
        return lambda prompt, num_tokens: (tokens, 1.0, {"calls": 1})

    rows = program.measure({"a": way([1, 2]), "b": way([1, 3])}, [[7]], 2, 1)
    assert [row["same_tokens"] for row in rows] == [True, False]
    assert "NO" in program.table(rows)


def test_half_of_the_latency_passes_before_a_call_and_half_after(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(program.time, "sleep", events.append)
    with serving() as worker, program.DelayedClient(worker.server.address, 20.0) as client:
        original = Client.call

        def called(self: Client, name: str, request: Any, **options: Any) -> Any:
            events.append(name)
            return original(self, name, request, **options)

        monkeypatch.setattr(Client, "call", called)
        client.ping()
    assert events == [0.01, "Ping", 0.01]
