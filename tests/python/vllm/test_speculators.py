"""The name that is replaced when vLLM imports it, on a made-up vLLM."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nwor_specpv.vllm.hooks import speculators, wrapping

PACKAGE = "vllm.v1.worker.gpu.spec_decode"
RUNNER = "vllm.v1.worker.gpu.model_runner"


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that has the name, and a module that imports it."""
    folder = tmp_path / "vllm" / "v1" / "worker" / "gpu"
    (folder / "spec_decode").mkdir(parents=True)
    for parent in (folder, *list(folder.parents)[:3]):
        (parent / "__init__.py").touch()
    source = "def init_speculator(vllm_config, device): ...\n"
    (folder / "spec_decode" / "__init__.py").write_text(source)
    (folder / "model_runner.py").write_text(f"from {PACKAGE} import init_speculator\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(speculators, "problem", "not replaced yet")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def make_ours(vllm_config: object, device: object) -> str:
    return "ours"


def waiting() -> int:
    return sum(isinstance(finder, wrapping._Awaiting) for finder in sys.meta_path)


@pytest.mark.usefixtures("made_up")
def test_the_name_is_replaced_when_its_package_is_imported() -> None:
    for _ in range(2):
        speculators.prepare(make_ours)
    assert waiting() == 1
    assert PACKAGE not in sys.modules
    assert speculators.problem is not None
    runner = importlib.import_module(RUNNER)
    found = importlib.import_module(PACKAGE)
    assert speculators.problem is None
    assert waiting() == 0
    assert runner.init_speculator is found.init_speculator
    speculators.prepare(make_ours)  # once more: it has been imported
    assert found.init_speculator.__wrapped__.__code__.co_varnames == ("vllm_config", "device")
    assert not hasattr(found.init_speculator.__wrapped__, "__wrapped__"), "replaced twice"


@pytest.mark.usefixtures("made_up")
def test_a_package_without_the_name_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "vllm" / "v1" / "worker" / "gpu"
    (folder / "spec_decode" / "__init__.py").write_text("")
    speculators.prepare(make_ours)
    importlib.import_module(PACKAGE)
    assert f"this vLLM has no {PACKAGE}.init_speculator" in str(speculators.problem)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_ours_is_built_where_it_is_wanted(method: str) -> None:
    speculators.prepare(make_ours)
    found = importlib.import_module(PACKAGE)
    config = SimpleNamespace(
        additional_config={"nwor_specpv": {"enable_specpv": True}},
        speculative_config=SimpleNamespace(method=method),
    )
    expected = "ours" if method == "eagle3" else None  # what the made-up one returns
    assert found.init_speculator(config, "cpu") == expected
