"""Another release of transformers: one line, before the host imports any of it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
import transformers

from nwor_specpv import NworError
from nwor_specpv.cli import doctor
from nwor_specpv.transformers import requirement

ROOT = Path(__file__).resolve().parents[3]
COMMAND = f"`pip install '{requirement.REQUIREMENT}'`"


def check(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"transformers": version}[name])
    requirement.check_transformers()


@pytest.mark.parametrize("version", ["5.16.0", "5.19.0", "5.22.2", "5.23.9", "5.16.0.dev0"])
def test_releases_in_range_are_taken_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        check(monkeypatch, version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["4.57.6", "5.2.0", "5.15.1"])
def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    with pytest.raises(NworError) as caught:
        check(monkeypatch, version)
    text = str(caught.value)
    assert f"needs transformers 5.16 to 5.23, but {version} is installed" in text
    assert COMMAND in text
    assert "\n" not in text


@pytest.mark.parametrize("version", ["5.24.0", "6.0.0"])
def test_a_newer_release_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        check(monkeypatch, version)
    (record,) = caplog.records
    assert f"transformers {version} is newer than 5.23" in record.getMessage()
    assert COMMAND in record.getMessage()


def test_the_installed_release_is_in_range() -> None:
    found = tuple(map(int, re.match(r"(\d+)\.(\d+)", transformers.__version__).groups()))
    assert requirement.OLDEST <= found <= requirement.NEWEST


def test_importing_the_host_without_transformers_is_one_line() -> None:
    code = (
        "import importlib.util as u, sys; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'transformers' else real(name, *a)\n"
        "try: import nwor_specpv.transformers\n"
        "except ValueError as error: print(error, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == (
        f"the transformers host needs the package transformers: run {COMMAND} False\n"
    )


def test_metadata_and_doctor_name_the_same_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirement.REQUIREMENT in project["optional-dependencies"]["transformers"]
    assert f'"{requirement.REQUIREMENT}"' == doctor._TRANSFORMERS
