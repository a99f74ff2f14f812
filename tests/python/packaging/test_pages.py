"""README.md and docs/: the README's Python runs as it stands, and no link leads nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PAGES = [
    *(ROOT / name for name in ("README.md", "deploy/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_readme_has_an_example_for_each_kind_of_host() -> None:
    assert len(EXAMPLES) == 2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A whole model runs: beside other tests its threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_an_example_of_the_readme_runs(index: int) -> None:
    exec(compile(EXAMPLES[index], f"README.md, example {index + 1}", "exec"), {})


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", title.lower())
        found.add(plain.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link
