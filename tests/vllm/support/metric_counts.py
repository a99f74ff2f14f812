"""What our counters have grown by since a snapshot of them."""

from __future__ import annotations

from typing import Any

from nwor_specpv import Metrics


def grown(before: dict[str, Any], name: str) -> int:
    return Metrics().snapshot()[name] - before[name]


def full_steps_since(before: dict[str, Any]) -> dict[str, int]:
    """By trigger."""
    now, was = (counts["specpv_full_steps_total"] for counts in (Metrics().snapshot(), before))
    return {trigger: now[trigger] - was.get(trigger, 0) for trigger in now}
