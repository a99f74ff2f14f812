"""The example of docs/generate.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "generate.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    exec(compile(example, "docs/generate.md", "exec"), {})
