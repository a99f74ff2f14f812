#!/usr/bin/env python3
"""Writes grafana/dashboards/nwor_specpv.json from the list of panels below.

deploy/make_dashboard.py            # write it
deploy/make_dashboard.py --check    # exit 1 if the file is not what this would write
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent / "grafana" / "dashboards" / "nwor_specpv.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOB = 'job=~"$job"'
WIDTH, HEIGHT, COLUMNS = 8, 8, 24


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # (PromQL, legend)
    about: str


def rate(metric: str, by: str = "") -> str:
    inner = f"rate({metric}{{{JOB}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


STAGED, COMMITTED = rate("nwor_staged_tokens_total"), rate("nwor_committed_tokens_total")
REJECTED, ROUNDS = rate("nwor_rejected_tokens_total"), rate("nwor_rounds_total")
AVOIDED, WRITTEN = rate("nwor_cache_bytes_avoided_total"), rate("nwor_cache_bytes_written_total")
LATENCY = rate("nwor_commit_seconds_bucket", "le")

PANELS = (
    Panel(
        "Acceptance rate",
        "percentunit",
        ((f"{COMMITTED} / {STAGED}", "accepted of drafted"),),
        "Draft tokens committed to the cache, of those that were staged.",
    ),
    Panel(
        "Draft tokens",
        "short",
        ((STAGED, "staged"), (COMMITTED, "committed"), (REJECTED, "rejected")),
        "Per second; staged = committed + rejected, unless commits fail.",
    ),
    Panel(
        "Accepted drafts a round",
        "short",
        ((f"{COMMITTED} / {ROUNDS}", "drafts"),),
        "Over all requests of a step.",
    ),
    Panel(
        "Cache writes",
        "Bps",
        ((WRITTEN, "written"), (AVOIDED, "avoided")),
        "Bytes that reached the paged KV cache, and those of rejected drafts that did not.",
    ),
    Panel(
        "Write avoidance",
        "percentunit",
        ((f"{AVOIDED} / ({AVOIDED} + {WRITTEN})", "avoided"),),
        "The share of cache bytes that was never written.",
    ),
    Panel(
        "Commit, host time",
        "s",
        (
            (f"histogram_quantile(0.5, {LATENCY})", "median"),
            (f"histogram_quantile(0.99, {LATENCY})", "99th percentile"),
        ),
        "On a GPU the time of the launch, not of the kernel.",
    ),
    Panel(
        "Bypasses by reason",
        "short",
        ((rate("nwor_fallback_total", "reason"), "{{reason}}"),),
        "Per second; docs/vllm.md says what each reason means.",
    ),
    Panel(
        "Failed commits by reason",
        "short",
        (
            (rate("nwor_commit_failures_total", "reason"), "{{reason}}"),
            (rate("nwor_recoveries_total"), "requests computed again"),
            (f"sum(nwor_staging_off_engines{{{JOB}}})", "engines without drafts"),
        ),
        "Per second, and engines; docs/vllm.md says what happens after a fault.",
    ),
    Panel(
        "Rounds",
        "short",
        ((ROUNDS, "rounds"), (rate("nwor_aborted_rounds_total"), "aborted")),
        "Verification steps per second.",
    ),
    Panel(
        "Contract violations",
        "short",
        ((f"sum(nwor_contract_violations_total{{{JOB}}})", "violations"),),
        "Counted with check_contract only; anything above 0 is a bug.",
    ),
    Panel(
        "Staging memory",
        "bytes",
        ((f"sum by (instance) (nwor_staging_bytes{{{JOB}}})", "{{instance}}"),),
        "Held by staging buffers.",
    ),
    Panel(
        "Resident memory",
        "bytes",
        ((f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}"),),
        "Of the worker processes.",
    ),
    Panel(
        "Drafts over views",
        "short",
        (
            (rate("specpv_drafted_tokens_total"), "drafted"),
            (rate("specpv_confirmed_tokens_total"), "confirmed"),
        ),
        "Tokens per second that the target drafted for itself, mode lossless.",
    ),
    Panel(
        "Failed drafting over views",
        "short",
        ((f"sum by (reason) (specpv_draft_failures_total{{{JOB}}})", "{{reason}}"),),
        "Since the worker started; the log says what failed.",
    ),
    Panel(
        "Drift",
        "percentunit",
        (
            (
                f"{rate('specpv_deviating_rows_total')} / {rate('specpv_probed_rows_total')}",
                "deviating of probed rows",
            ),
        ),
        "Mode refresh: rows whose attention over the view differs by more than a tenth.",
    ),
    Panel(
        "Worker calls",
        "short",
        ((rate("nwor_worker_calls_total", "outcome"), "{{outcome}}"),),
        "Per second; calls of the target worker.",
    ),
    Panel(
        "Worker time per call",
        "s",
        (
            (
                f"{rate('nwor_worker_call_seconds_total')} / {rate('nwor_worker_calls_total')}",
                "mean",
            ),
            (
                f"{rate('nwor_worker_wait_seconds_total')} / {rate('nwor_worker_calls_total')}",
                "waiting",
            ),
        ),
        "From a call to its answer, and the part that it waited for its turn.",
    ),
    Panel(
        "Worker traffic",
        "Bps",
        (
            (rate("nwor_worker_bytes_received_total"), "received"),
            (rate("nwor_worker_bytes_sent_total"), "sent"),
        ),
        "Bytes of messages.",
    ),
    Panel(
        "Sessions",
        "short",
        ((f"sum by (instance) (nwor_sessions_live{{{JOB}}})", "{{instance}}"),),
        "Sequences that the target worker keeps.",
    ),
    Panel(
        "Builds",
        "short",
        ((f"count by (version, revision) (nwor_build_info{{{JOB}}})", "{{version}} {{revision}}"),),
        "Workers by the build they run.",
    ),
)


def render(index: int, panel: Panel) -> dict[str, Any]:
    across = COLUMNS // WIDTH
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": {
            "x": index % across * WIDTH,
            "y": index // across * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": name,
            }
            for i, (expr, name) in enumerate(panel.queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    job = {
        "name": "job",
        "type": "query",
        "label": "Job",
        "datasource": DATASOURCE,
        "query": "label_values(nwor_build_info, job)",
        "includeAll": True,
        "multi": True,
        "refresh": 2,
    }
    return {
        "uid": "nwor-specpv",
        "title": "nwor_specpv",
        "tags": ["nwor_specpv", "vllm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, job]},
        "panels": [render(index, panel) for index, panel in enumerate(PANELS)],
    }


def main(arguments: list[str]) -> int:
    text = json.dumps(dashboard(), indent=2) + "\n"
    if arguments == ["--check"]:
        same = TARGET.is_file() and TARGET.read_text() == text
        if not same:
            print(f"{TARGET} is out of date: run {Path(__file__).name}", file=sys.stderr)
        return 0 if same else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
