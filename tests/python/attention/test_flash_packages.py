"""FlashAttention packages are imported when a route is asked for by name, and only then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention.steps import Shape, make_step
from nwor_specpv import NworError, flash_packages


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to put packages into; none of the real ones can be found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn_interface", "vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "vllm.py").write_text("raise ImportError('no GPU here')\n")
    flash_packages.load.cache_clear()
    yield tmp_path
    flash_packages.load.cache_clear()
    for name in ("flash_attn", "flash_attn_interface", "vllm"):
        sys.modules.pop(name, None)


def test_the_first_package_that_can_be_is_imported_once(packages: Path) -> None:
    seen = packages / "seen"
    module = f"with open({str(seen)!r}, 'a') as file:\n    file.write('x')\n"
    (packages / "flash_attn.py").write_text(module)
    assert flash_packages.load("flash_attn_2") == ""
    assert flash_packages.load("flash_attn_2") == ""
    assert seen.read_text() == "x"


def test_what_keeps_every_package_away_is_told(packages: Path) -> None:
    (packages / "flash_attn.py").write_text("import nwor_no_such_module\n")
    reason = flash_packages.load("flash_attn_2")
    assert "flash_attn: No module named 'nwor_no_such_module'" in reason
    assert "vllm.vllm_flash_attn: ImportError: no GPU here" in reason
    assert "flash_attn_interface is not installed" in flash_packages.load("flash_attn_3")


def test_a_route_asked_for_by_name_imports_its_package(packages: Path) -> None:
    (packages / "flash_attn_interface.py").write_text("")
    step = make_step(Shape([1], [3]), 1)
    step.run()
    step.run(route="cpu")
    assert "flash_attn_interface" not in sys.modules
    with pytest.raises(NworError, match="flash_attn_3"):
        step.run(route="flash_attn_3")
    assert "flash_attn_interface" in sys.modules
