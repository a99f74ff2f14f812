"""What is counted, what is rendered and what is scraped are the same numbers."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nwor_specpv import _C, BYPASS_REASONS, Interceptor, Metrics, NworConfig, RoundPlan, _stamp
from tests.python.metrics.rounds import BYTES_PER_TOKEN, play

LABELS = {"rank", "reason", "trigger", "outcome", "le"}
INFO_LABELS = {
    "nwor_build_info": {"version", "torch", "cuda", "architectures", "revision"},
    "nwor_engine_info": {"rank", "drafter", "draft_tokens", "mode", "attention"},
}


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    found = Metrics()
    assert found.status()["built"], "the tests need a build with prometheus-cpp"
    yield found
    found.stop()


def seed() -> int:
    value = int(os.environ.get("NWOR_TEST_SEED") or secrets.randbits(32))
    print(f"seed={value}")
    return value


def parse(text: str) -> dict[str, float]:
    """Every sample by its name and labels, as `name{label="value"}`."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in samples, f"{key} appears twice"
            samples[key] = sample.value
    return samples


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return response.read().decode()


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]


def test_counters_add_up_to_what_was_played(metrics: Metrics) -> None:
    before, text_before = metrics.snapshot(), parse(metrics.render())
    interceptor, books = play(200, seed())
    after, text_after = metrics.snapshot(), parse(metrics.render())
    for name, expected in books.metrics().items():
        assert grown(before, after, name) == expected, name
        assert grown(text_before, text_after, name) == expected, name
    stats = interceptor.stats()
    assert stats["committed_tokens"] + stats["rejected_tokens"] == stats["staged_tokens"]
    assert stats["cache_bytes_avoided"] == stats["rejected_tokens"] * BYTES_PER_TOKEN
    assert after["nwor_fallback_total"] == before["nwor_fallback_total"]


def test_counters_survive_the_interceptor_and_its_memory_does_not(metrics: Metrics) -> None:
    before = metrics.snapshot()
    interceptor, books = play(8, seed())
    held = metrics.snapshot()["nwor_staging_bytes"] - before["nwor_staging_bytes"]
    assert held == interceptor.stats()["staging_bytes"] > 0
    del interceptor
    after = metrics.snapshot()
    assert after["nwor_staging_bytes"] == before["nwor_staging_bytes"]
    for name, expected in books.metrics().items():
        assert grown(before, after, name) == expected, name


def test_a_bypass_is_counted_under_its_reason(metrics: Metrics) -> None:
    before = parse(metrics.render())
    interceptor = Interceptor(NworConfig(enable_nwor=False))
    decision = interceptor.begin(RoundPlan([3], [2]))
    interceptor.abort()
    after = parse(metrics.render())
    assert decision.reason == "disabled"
    assert grown(before, after, 'nwor_fallback_total{reason="disabled"}') == 1
    assert grown(before, after, 'nwor_fallback_total{reason="capacity"}') == 0
    assert metrics.snapshot()["nwor_fallback_total"]["disabled"] >= 1


def test_every_reason_has_a_series_before_it_happens(metrics: Metrics) -> None:
    samples = parse(metrics.render())
    found = {name for name in samples if name.startswith("nwor_fallback_total")}
    assert found == {
        f'nwor_fallback_total{{reason="{reason}"}}' for reason in BYPASS_REASONS if reason != "none"
    }


def test_names_labels_and_types_keep_the_conventions(metrics: Metrics) -> None:
    for family in text_string_to_metric_families(metrics.render()):
        assert family.name.startswith(("nwor_", "specpv_", "process_")), family.name
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram", "summary"), family.name
        allowed = INFO_LABELS.get(family.name, LABELS)
        for sample in family.samples:
            assert set(sample.labels) <= allowed, sample


def test_the_build_is_described_by_labels(metrics: Metrics) -> None:
    stamp = _stamp.read_stamp()
    families = text_string_to_metric_families(metrics.render())
    (sample,) = next(f for f in families if f.name == "nwor_build_info").samples
    assert sample.value == 1
    assert sample.labels == {
        "version": stamp.version,
        "torch": stamp.torch,
        "cuda": stamp.cuda,
        "architectures": " ".join(stamp.architectures),
        "revision": stamp.revision,
    }


def test_the_engine_is_described_by_labels(metrics: Metrics) -> None:
    _C.describe_engine(drafter="eagle3", draft_tokens=15, mode="lossless", attention="cuda")
    series = 'nwor_engine_info{attention="cuda",draft_tokens="15",drafter="eagle3",mode="lossless"}'
    assert parse(metrics.render())[series] == 1


def test_the_latency_histogram_is_cumulative_and_complete(metrics: Metrics) -> None:
    play(8, seed())
    samples = parse(metrics.render())
    buckets = [v for k, v in samples.items() if k.startswith("nwor_commit_seconds_bucket")]
    assert len(buckets) == 13
    assert buckets == sorted(buckets)
    assert buckets[-1] == samples["nwor_commit_seconds_count"] > 0
    assert samples["nwor_commit_seconds_sum"] > 0


def test_the_process_is_described(metrics: Metrics) -> None:
    samples = parse(metrics.render())
    assert samples["process_resident_memory_bytes"] > 1 << 20
    assert samples["process_cpu_seconds_total"] > 0
    assert samples["process_open_fds"] >= 3
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    assert boot - 10 <= samples["process_start_time_seconds"]


def test_a_scrape_gets_the_rendered_text(metrics: Metrics) -> None:
    play(4, seed())
    rendered = parse(metrics.render())
    scraped = parse(scrape(metrics.serve()))
    assert set(scraped) == set(rendered)
    for name, value in rendered.items():
        if name.startswith("nwor_"):
            assert scraped[name] == value, name


def test_counters_never_go_backwards_while_rounds_run(metrics: Metrics) -> None:
    port = metrics.serve()
    numbers = seed()
    done = threading.Event()

    def run() -> None:
        for number in range(10):
            play(20, numbers + number)
        done.set()

    worker = threading.Thread(target=run)
    worker.start()
    last: dict[str, float] = {}
    scrapes = 0
    while not done.is_set() or scrapes == 0:
        now = {k: v for k, v in parse(scrape(port)).items() if k.startswith("nwor_")}
        for name, value in last.items():
            if "_total" in name or "_bucket" in name or "_count" in name:
                assert now[name] >= value, name
        last = now
        scrapes += 1
    worker.join()


def test_promtool_has_nothing_to_say(metrics: Metrics) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    play(4, seed())
    for text in (metrics.render(), scrape(metrics.serve())):
        answer = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
        )
        assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
