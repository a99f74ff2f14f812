"""The command line, in this process and in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nwor_specpv.cli import main as cli


def run(*arguments: str, pythonpath: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """`python -m nwor_specpv` in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NWOR_SPECPV_")} | env
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    return subprocess.run(
        [sys.executable, "-m", "nwor_specpv", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The same in this process."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err
