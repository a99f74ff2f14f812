"""The examples of the pages about generate run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize(("page", "count"), [("generate.md", 2), ("generate_options.md", 2)])
def test_the_examples_run(page: str, count: int) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.M | re.S)
    assert len(examples) == count
    exec(compile("".join(examples), f"docs/{page}", "exec"), {})
