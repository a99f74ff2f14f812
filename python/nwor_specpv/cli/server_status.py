"""The state of a running server, read from its metrics endpoint.

`collect(url)` returns a JSON-able dict; `lines(report)` is the same for people. Neither needs torch
or the native library.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BUILD_LABELS = ("version", "revision", "torch", "cuda", "architectures")
_ENGINE_LABELS = ("drafter", "draft_tokens", "mode", "attention")
_COUNTS = {
    "rounds": "nwor_rounds_total",
    "aborted_rounds": "nwor_aborted_rounds_total",
    "staged_tokens": "nwor_staged_tokens_total",
    "committed_tokens": "nwor_committed_tokens_total",
    "rejected_tokens": "nwor_rejected_tokens_total",
    "failed_tokens": "nwor_failed_tokens_total",
    "recoveries": "nwor_recoveries_total",
    "staging_off_engines": "nwor_staging_off_engines",
    "cache_bytes_written": "nwor_cache_bytes_written_total",
    "cache_bytes_avoided": "nwor_cache_bytes_avoided_total",
    "staging_bytes": "nwor_staging_bytes",
    "contract_violations": "nwor_contract_violations_total",
    "partial_steps": "specpv_partial_steps_total",
    "draft_passes": "specpv_draft_passes_total",
    "plain_steps": "specpv_plain_steps_total",
    "plain_step_tokens": "specpv_plain_step_tokens_total",
    "plain_step_seconds": "specpv_plain_step_seconds_total",
    "guess_steps": "specpv_guess_steps_total",
    "guess_step_tokens": "specpv_guess_step_tokens_total",
    "guess_step_seconds": "specpv_guess_step_seconds_total",
    "pass_steps": "specpv_pass_steps_total",
    "pass_step_tokens": "specpv_pass_step_tokens_total",
    "pass_step_seconds": "specpv_pass_step_seconds_total",
    "arm_switches": "specpv_arm_switches_total",
    "probe_steps": "specpv_probe_steps_total",
    "view_drafted_tokens": "specpv_drafted_tokens_total",
    "view_confirmed_tokens": "specpv_confirmed_tokens_total",
    "lossy_engines": "specpv_lossy_engines",
    "probed_rows": "specpv_probed_rows_total",
    "deviating_rows": "specpv_deviating_rows_total",
    "rechecked_tokens": "specpv_rechecked_tokens_total",
    "disagreed_tokens": "specpv_disagreed_tokens_total",
    "sessions_live": "nwor_sessions_live",
    "sessions_started": "nwor_sessions_started_total",
    "sessions_evicted": "nwor_sessions_evicted_total",
    "sessions_expired": "nwor_sessions_expired_total",
    "worker_bytes_received": "nwor_worker_bytes_received_total",
    "worker_bytes_sent": "nwor_worker_bytes_sent_total",
}
_COUNTS_BY_LABEL = {
    "bypasses": ("nwor_fallback_total", "reason"),
    "commit_failures": ("nwor_commit_failures_total", "reason"),
    "full_steps": ("specpv_full_steps_total", "trigger"),
    "draft_failures": ("specpv_draft_failures_total", "reason"),
    "worker_calls": ("nwor_worker_calls_total", "outcome"),
}
_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20


def collect(url: str) -> dict[str, Any]:
    """What the server at `url` does and has counted, summed over its series.

    `problem` says why nothing could be read; the report then has nothing else but the URL.
    """
    try:
        url = _complete(url)
        samples = _parse(_read(url))
    except (OSError, ValueError, http.client.HTTPException) as error:
        return {"url": url, "problem": f"{url} does not answer: {_reason(error)}"}
    build = _labels(samples, "nwor_build_info", _BUILD_LABELS)
    if build is None:
        problem = f"{url} is not an endpoint of nwor_specpv: it has no series nwor_build_info"
        return {"url": url, "problem": problem}
    report: dict[str, Any] = {"url": url, "problem": None}
    started = _total(samples, "process_start_time_seconds")
    report["uptime_seconds"] = max(0, int(time.time() - started)) if started else None
    report["build"] = build
    report["engine"] = _labels(samples, "nwor_engine_info", _ENGINE_LABELS)
    totals = {key: _total(samples, name) for key, name in _COUNTS.items()}
    report |= {key: x if key.endswith("_seconds") else int(x) for key, x in totals.items()}
    for key, (name, label) in _COUNTS_BY_LABEL.items():
        report[key] = _by_label(samples, name, label)
    report["acceptance"] = _ratio(report["committed_tokens"], report["staged_tokens"])
    report["draft_passes_per_round"] = _ratio(report["draft_passes"], report["rounds"])
    return report


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and texts. Lines about what the server does not use are left out."""
    if report["problem"]:
        return [("server", report["problem"])]
    found = [
        ("server", report["url"] + _uptime(report["uptime_seconds"])),
        ("version", _build(report["build"])),
        ("engine", _engine(report["engine"])),
        ("rounds", _with(report, "rounds", "aborted_rounds", "aborted")),
        ("acceptance", _share(report, "committed_tokens", "staged_tokens", "draft tokens")),
        (
            "draft tokens",
            f"{report['staged_tokens']:,} staged, {report['committed_tokens']:,} committed, "
            f"{report['rejected_tokens']:,} rejected",
        ),
        (
            "cache writes",
            f"{_bytes(report['cache_bytes_written'])} written, "
            f"{_bytes(report['cache_bytes_avoided'])} avoided",
        ),
        ("staging", _bytes(report["staging_bytes"])),
        ("bypassed", _bypasses(report["bypasses"])),
    ]
    if report["commit_failures"]:
        found.append(
            (
                "failed commits",
                f"{_listed(report['commit_failures'])}; {report['failed_tokens']:,} draft tokens, "
                f"requests computed again {report['recoveries']:,} times",
            )
        )
    if report["staging_off_engines"]:
        found.append(("drafts", "OFF after a fault; the log says which and for how long"))
    full = sum(report["full_steps"].values())
    if report["partial_steps"] or full:
        by_trigger = f" ({_listed(report['full_steps'])})" if full else ""
        found.append(("steps", f"{report['partial_steps']:,} partial, {full:,} full{by_trigger}"))
    if report["plain_steps"] or report["guess_steps"] or report["pass_steps"]:
        kinds = [_speed(report, kind) for kind in ("plain", "guess", "pass")]
        found.append(("chosen steps", ", ".join(kinds)))
        tried = f"{report['arm_switches']:,} switches, {report['probe_steps']:,} probe steps"
        found.append(("choices", tried))
    if report["draft_passes"]:
        mean = report["draft_passes_per_round"]
        per_round = "" if mean is None else f", {mean:.2f} per round"
        found.append(("draft passes", f"{report['draft_passes']:,}{per_round}"))
        confirmed = _share(
            report, "view_confirmed_tokens", "view_drafted_tokens", "tokens drafted over views"
        )
        found.append(("confirmed", confirmed))
    if report["draft_failures"]:
        found.append(("draft failures", _listed(report["draft_failures"])))
    if report["lossy_engines"]:
        found.append(("lossless", "NO: tokens may differ from those of full attention"))
    if report["probed_rows"]:
        found.append(("drift", _share(report, "deviating_rows", "probed_rows", "probed rows")))
    if report["rechecked_tokens"]:
        drift = _share(report, "disagreed_tokens", "rechecked_tokens", "rechecked tokens")
        found.append(("drift", drift))
    if report["contract_violations"]:
        found.append(("contract", f"BROKEN {report['contract_violations']:,} times"))
    if report["sessions_started"]:
        found.append(
            (
                "sessions",
                f"{report['sessions_live']:,} live, {report['sessions_started']:,} started, "
                f"{report['sessions_evicted']:,} evicted, {report['sessions_expired']:,} expired",
            )
        )
    if report["worker_calls"]:
        traffic = f"{_bytes(report['worker_bytes_received'])} received, "
        traffic += f"{_bytes(report['worker_bytes_sent'])} sent"
        found.append(("calls", f"{_listed(report['worker_calls'])}; {traffic}"))
    return found


Samples = dict[str, list[tuple[dict[str, str], float]]]


def _complete(url: str) -> str:
    """Adds the scheme and the path where they are missing: `localhost:9400` is enough."""
    url = url.strip()
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    return urllib.parse.urlunsplit(
        parts if parts.path.strip("/") else parts._replace(path="/metrics")
    )


def _read(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the address is neither http nor https")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        return response.read(_MAX_BYTES).decode("utf-8", errors="replace")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) if not hasattr(error, "code") else None
    text = getattr(reason, "strerror", None) or reason or error
    return " ".join(str(text).split()) or type(error).__name__


def _parse(text: str) -> Samples:
    """Every sample of an exposition text, by name. Raises ValueError for a value that is none."""
    samples: Samples = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name.startswith(("nwor_", "specpv_", "process_")):
            samples.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
    return samples


def _total(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples.get(name, ()))


def _by_label(samples: Samples, name: str, label: str) -> dict[str, int]:
    """Counts above 0 by the value of a label."""
    counts: dict[str, int] = {}
    for labels, value in samples.get(name, ()):
        if value > 0:
            key = labels.get(label, "")
            counts[key] = counts.get(key, 0) + int(value)
    return counts


def _labels(samples: Samples, name: str, keys: tuple[str, ...]) -> dict[str, str] | None:
    for labels, _ in samples.get(name, ()):
        return {key: labels.get(key, "") for key in keys}
    return None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _uptime(seconds: int | None) -> str:
    if seconds is None:
        return ""
    minutes, hours, days = seconds // 60 % 60, seconds // 3600 % 24, seconds // 86400
    return f", up {days} d {hours} h" if days else f", up {hours} h {minutes} min"


def _build(build: dict[str, str]) -> str:
    cuda = f"CUDA {build['cuda']}" if build["cuda"] else "no CUDA"
    return f"{build['version']} ({build['revision']}), torch {build['torch']}, {cuda}"


def _engine(engine: dict[str, str] | None) -> str:
    if engine is None:
        return "not described"
    return (
        f"drafter {engine['drafter']}, up to {engine['draft_tokens']} draft tokens, "
        f"mode {engine['mode']}, attention {engine['attention']}"
    )


def _speed(report: dict[str, Any], kind: str) -> str:
    """Steps of a kind, and the tokens per second of those that were timed."""
    seconds, tokens = report[f"{kind}_step_seconds"], report[f"{kind}_step_tokens"]
    speed = f" ({tokens / seconds:,.0f} tokens/s)" if seconds else ""
    return f"{report[f'{kind}_steps']:,} {kind}{speed}"


def _with(report: dict[str, Any], key: str, part: str, word: str) -> str:
    return f"{report[key]:,}" + (f" ({report[part]:,} {word})" if report[part] else "")


def _share(report: dict[str, Any], part: str, whole: str, of: str) -> str:
    share = _ratio(report[part], report[whole])
    if share is None:
        return f"no {of} yet"
    return f"{share:.1%} ({report[part]:,} of {report[whole]:,} {of})"


def _bypasses(counts: dict[str, int]) -> str:
    return f"{_listed(counts)} (docs/metrics.md explains the reasons)" if counts else "nothing"


def _listed(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in ordered)


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
