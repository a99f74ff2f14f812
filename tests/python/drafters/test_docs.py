"""The examples of docs/drafters.md run as they stand; the card says what the file is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nwor_specpv.drafters import registry
from nwor_specpv.drafters.eagle3 import SHIPPED
from nwor_specpv.drafters.eagle3_head import Eagle3Head

PAGE = Path(__file__).resolve().parents[3] / "docs" / "drafters.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_an_example_runs(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    exec(compile(EXAMPLES[index], f"docs/drafters.md, example {index + 1}", "exec"), {})


def test_the_card_has_the_sizes_of_the_file() -> None:
    card = SHIPPED.with_suffix(".md").read_text(encoding="utf-8")
    head = Eagle3Head.load(SHIPPED)
    assert f"{head.num_parameters:,} of its own" in card
    assert f"{len(head.draft_to_target):,} of {head.shape.target_vocabulary:,} tokens" in card
    assert f"{SHIPPED.stat().st_size / 1e6:.1f} MB" in card
    low, middle, high = head.shape.feature_layers
    assert f"layers {low}, {middle} and {high}" in card
    assert f"{head.shape.window} entries" in card
