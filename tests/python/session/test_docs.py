"""The examples of docs/sessions.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sessions.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_an_example_runs(index: int) -> None:
    exec(compile(EXAMPLES[index], f"docs/sessions.md, example {index + 1}", "exec"), {})
