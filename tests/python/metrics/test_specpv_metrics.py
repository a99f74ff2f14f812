"""The metrics of partial verification: each has its type and counts what a generation does."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from nwor_specpv import FULL_TRIGGERS, Metrics
from tests.python.specpv.contexts import seeded
from tests.python.specpv.test_decoding import configured, start

METRICS = {
    "specpv_partial_steps": "counter",
    "specpv_full_steps": "counter",
    "specpv_kv_bytes_read": "counter",
    "specpv_kv_bytes_full": "counter",
    "specpv_rechecked_tokens": "counter",
    "specpv_disagreed_tokens": "counter",
    "specpv_view_tokens": "summary",
    "specpv_context_tokens": "summary",
    "specpv_refresh_seconds": "histogram",
}


def test_every_metric_has_its_type_and_moves() -> None:
    def families() -> dict:
        return {f.name: f for f in text_string_to_metric_families(Metrics().render())}

    def total(family: object) -> float:
        return sum(s.value for s in family.samples if not s.name.endswith("_bucket"))

    before = families()
    assert {name: before[name].type for name in METRICS} == METRICS
    rng = seeded()
    disagreed = 0
    while disagreed == 0:  # a sliding window over random weights: soon
        host = start(rng, configured(rng, specpv_selector="sliding"), count=1)
        host.decode(12, rng)
        disagreed = host.requests[0].cache.disagreed_tokens
    start(rng, configured(rng, specpv_selector="specpv"), count=1).decode(12, rng)
    after = families()
    for name in METRICS:
        assert total(after[name]) > total(before[name]), name
    triggers = {s.labels["trigger"] for s in after["specpv_full_steps"].samples}
    assert triggers == set(FULL_TRIGGERS) - {"none"}
    buckets = [s.value for s in after["specpv_refresh_seconds"].samples if "le" in s.labels]
    assert buckets == sorted(buckets)
    assert buckets[-1] == Metrics().snapshot()["specpv_refresh_seconds_count"]
