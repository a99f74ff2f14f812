"""FlashAttention packages are imported when a route is asked for by name, and only then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nwor_specpv import NworError, verify_attention
from nwor_specpv.ops import flash_packages
from tests.python.attention.steps import Shape, make_step

NAMES = ("flash_attn", "flash_attn_interface", "vllm")


def imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in NAMES]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to put packages into; none of the real ones can be found, no op is there."""
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        for name in imported():
            patch.delitem(sys.modules, name)
        (tmp_path / "vllm.py").write_text("raise ImportError('no GPU here')\n")
        patch.setattr(flash_packages, "is_present", lambda _: False)
        flash_packages.load.cache_clear()
        yield tmp_path
        for name in imported():
            del sys.modules[name]
    flash_packages.load.cache_clear()


def test_packages_are_imported_once_until_the_op_is_there(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = packages / "seen"
    module = f"with open({str(seen)!r}, 'a') as file:\n    file.write('x')\n"
    (packages / "flash_attn.py").write_text(module)
    monkeypatch.setattr(flash_packages, "is_present", lambda _: seen.exists())
    assert flash_packages.load("flash_attn_2") == ""
    assert flash_packages.load("flash_attn_2") == ""
    assert seen.read_text() == "x"
    assert flash_packages.load("flash_attn_3") == "", "another package is not asked for then"


def test_what_keeps_every_package_away_is_told(packages: Path) -> None:
    (packages / "flash_attn.py").write_text("import nwor_no_such_module\n")
    reason = flash_packages.load("flash_attn_2")
    assert "flash_attn: No module named 'nwor_no_such_module'" in reason
    assert "vllm.vllm_flash_attn: ImportError: no GPU here" in reason
    assert "flash_attn_interface is not installed" in flash_packages.load("flash_attn_3")


def test_a_package_without_the_op_is_told_of(packages: Path) -> None:
    (packages / "flash_attn_interface.py").write_text("")
    assert "flash_attn_interface brings no kernels" in flash_packages.load("flash_attn_3")


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_route_asked_for_by_name_imports_its_package(
    packages: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    (packages / "flash_attn_interface.py").write_text("")
    step = make_step(Shape([1], [3]), 1)
    step.run()
    step.run(route="cpu")
    assert "flash_attn_interface" not in sys.modules
    if by_environment:
        monkeypatch.setenv("NWOR_SPECPV_ATTENTION_ROUTE", "flash_attn_3")
    with pytest.raises(NworError, match="flash_attn_3"):
        step.run(route="" if by_environment else "flash_attn_3")
    assert "flash_attn_interface" in sys.modules


def test_a_route_asked_for_by_name_compiles(packages: Path) -> None:
    step = make_step(Shape([1], [3]), 1)

    def layer(route: str) -> torch.Tensor:
        return verify_attention(**step.arguments, tree_mask=None, scale=step.scale, route=route)

    expected = layer("cpu")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled("cpu"), expected)
    with pytest.raises(ValueError, match="flash_attn_3"):  # of the op, not of the compiler
        compiled("flash_attn_3")
