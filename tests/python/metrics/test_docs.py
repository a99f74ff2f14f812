"""docs/metrics.md names every metric there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from nwor_specpv import _C, BYPASS_REASONS, FULL_TRIGGERS, Metrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def rendered_names() -> set[str]:
    """Family names as the text spells them; the parser takes _total from counters."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(Metrics().render())
    }


def section(title: str) -> dict[str, str]:
    """The two columns of the table under a heading."""
    page = PAGE.read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {title}\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|$", text, re.MULTILINE))


def test_the_table_is_complete_and_true() -> None:
    page = PAGE.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `((?:nwor|specpv|process)_\w+)", page, re.MULTILINE))
    assert documented == rendered_names()


def test_queries_name_existing_series_only() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:nwor|specpv|process)_[a-z_]+\b", page))
    named -= {"nwor_specpv", "specpv_full_refresh_interval"}
    known = rendered_names()
    known |= {f"nwor_commit_seconds_{part}" for part in ("bucket", "sum", "count")}
    assert named <= known


def test_every_trigger_is_explained() -> None:
    documented = section("Triggers")
    triggers = {label: text for label, text in FULL_TRIGGERS.items() if label != "none"}
    assert {label: documented.get(label) for label in triggers} == triggers


def test_every_reason_is_explained() -> None:
    documented = section("Reasons")
    reasons = {label: text for label, text in BYPASS_REASONS.items() if label != "none"}
    assert {label: documented.get(label) for label in reasons} == reasons


def test_every_outcome_is_explained() -> None:
    assert section("Outcomes") == {"outcome": "meaning", **_C.CALL_OUTCOMES}
