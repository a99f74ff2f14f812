"""Model folders: written whole, and found in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from nwor_specpv import NworError
from nwor_specpv.models import folder


def test_the_first_of_two_conversions_wins(tmp_path: Path) -> None:
    for content in ("first", "second"):
        made = folder.write_folder(tmp_path / "m", {"x": content}, {})
    assert (made / "x").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(NworError, match="dtype: got 'int8', expected one of float32"):
        folder.torch_dtype("int8")


def test_the_cache_is_where_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder.cache_root() == tmp_path / "nwor_specpv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder.cache_root() == tmp_path / "home" / ".cache" / "nwor_specpv"
