"""The examples of docs/generate.md run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "generate.md"


def test_the_examples_run() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(examples) == 3
    exec(compile("".join(examples), "docs/generate.md", "exec"), {})
