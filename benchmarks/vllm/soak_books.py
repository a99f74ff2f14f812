"""What soak.py holds a server to: its answers, its counters, its memory and its log."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from http_client import Reply
from server_process import Samples
from soak_traffic import Request, fits

MIB = 1 << 20
# Of the plugin; in a run without a fault all stay 0.
QUIET = (
    "nwor_failed_tokens_total", "nwor_commit_failures_total", "nwor_recoveries_total",
    "nwor_staging_off_engines", "nwor_fallback_total", "nwor_contract_violations_total",
    "nwor_aborted_rounds_total", "specpv_draft_failures_total",
)  # fmt: skip
GROWING = ("nwor_rounds_total", "nwor_staged_tokens_total", "nwor_committed_tokens_total",
           "nwor_rejected_tokens_total", "nwor_cache_bytes_written_total")  # fmt: skip
# What the traffic is meant to bring about in vLLM.
WANTED = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total")
# Lines without a process are of its start, when it does not know its name yet.
_LEVEL = re.compile(r"^\(.* pid=\d+\) .*\b(WARNING|ERROR|CRITICAL)\b|nwor_specpv")
_STAMP = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?")
_MOST_NAMED = 5


class Answers:
    """Every answer, and what is wrong with some. Thread-safety: none."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.tokens = self.left = self.repeated = 0
        self.wrong: list[str] = []
        self.different: list[str] = []  # texts that are not what the same request got before
        self._texts: dict[str, str] = {}

    def note(self, request: Request, reply: Reply) -> None:
        self.kinds[request.kind] += 1
        self.tokens += reply.tokens
        if reply.error:
            self.wrong.append(f"{request.kind}: {reply.error}")
            return
        if request.leave_after and not reply.finish:
            self.left += 1
            return
        self.finished[reply.finish] += 1
        if reply.finish not in ("stop", "length"):
            self.wrong.append(f"{request.kind}: ended with {reply.finish!r}")
        if reply.tokens > request.body["max_tokens"]:
            self.wrong.append(f"{request.kind}: {reply.tokens} tokens are too many")
        for stop in request.body.get("stop", ()):
            if stop in reply.text:
                self.wrong.append(f"{request.kind}: {stop!r} did not stop {reply.text!r}")
        if reply.finish == "stop" and not fits(request.body, reply.text):
            self.wrong.append(f"{request.kind}: {reply.text!r} is not what was asked for")
        if request.key:
            self._compare(request.key, reply.text)

    def _compare(self, key: str, text: str) -> None:
        self.repeated += key in self._texts
        before = self._texts.setdefault(key, text)
        if before != text:
            self.different.append(f"{key}: {before!r}, then {text!r}")

    def summary(self) -> dict[str, Any]:
        return {
            "requests": dict(self.kinds),
            "finished": dict(self.finished),
            "left": self.left,
            "tokens": self.tokens,
            "repeated": self.repeated,
            "different": len(self.different),
        }


def balance(own: Samples) -> float:
    """Staged tokens of which it is not said what became of them."""
    known = ("committed", "rejected", "failed")
    known_tokens = sum(own.total(f"nwor_{kind}_tokens_total") for kind in known)
    return own.total("nwor_staged_tokens_total") - known_tokens


class Counters:
    """The plugin's counters, scrape after scrape. `most_open`: drafts of all steps under way."""

    def __init__(self, most_open: int) -> None:
        self.problems: list[str] = []
        self._most_open = most_open
        self._last: dict[str, float] = {}

    def note(self, own: Samples) -> None:
        if not 0 <= balance(own) <= self._most_open:
            self._say(f"{balance(own):.0f} staged tokens are neither committed nor rejected")
        for name in GROWING:
            value = own.total(name)
            if value < self._last.get(name, 0):
                self._say(f"{name} went back to {value:.0f}")
            self._last[name] = value
        self._faults(own)

    def _faults(self, own: Samples) -> None:
        for name in QUIET:
            if own.total(name):
                self._say(f"{name} is above 0: {own.split(name, 'reason')}")

    def _say(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def end(self, own: Samples | None, engine: Samples) -> None:
        """`own`: None without the plugin.

        REQUIRES: the server is idle, and has had a request after the last one that was left.
        """
        if own is not None:
            self._end_own(own, engine)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            if engine.total(name):
                self._say(f"at the end {name} is {engine.total(name):.0f}")
        if engine.total("vllm:kv_cache_usage_perc"):
            self._say("at the end blocks of the KV cache are in use")
        for name in WANTED:
            if not engine.total(name):
                self._say(f"{name} is 0: the traffic did not bring it about")

    def _end_own(self, own: Samples, engine: Samples) -> None:
        self._faults(own)
        if balance(own) != 0:
            self._say(f"at the end {balance(own):.0f} staged tokens are unaccounted for")
        if own.total("nwor_committed_tokens_total") <= 0:
            self._say("nothing was committed")
        drafts = engine.total("vllm:spec_decode_num_draft_tokens_total")
        if drafts > own.total("nwor_staged_tokens_total"):
            self._say(f"vLLM verified {drafts:.0f} drafts, more than were staged")


class Memory:
    """Sizes in bytes over time."""

    def __init__(self) -> None:
        self.series: dict[str, list[tuple[float, float]]] = {}

    def note(self, seconds: float, **sizes: float) -> None:
        for name, size in sizes.items():
            self.series.setdefault(name, []).append((seconds, size))

    def growth(self, name: str) -> dict[str, float]:
        """From the second quarter of the time to the last one, in MiB; the first is for warming up.

        Medians: what is held for a moment does not count. `per_hour` is the slope of both halves.
        """
        points = self.series[name]
        end = points[-1][0]
        quarters = [[size for at, size in points if low * end / 4 <= at <= (low + 1) * end / 4]
                    for low in range(4)]  # fmt: skip
        warm = [(at, size) for at, size in points if at >= end / 4]
        told = {"first": points[0][1] / MIB, "last": points[-1][1] / MIB}
        if not quarters[1] or not quarters[3] or len(warm) < 2:
            return told
        slope = statistics.linear_regression(*zip(*warm, strict=True)).slope
        grown = statistics.median(quarters[3]) - statistics.median(quarters[1])
        return told | {"grown": grown / MIB, "per_hour": 3600 * slope / MIB}

    def problems(self, most_mib: float) -> list[str]:
        grown = {name: self.growth(name).get("grown", 0.0) for name in self.series}
        return [
            f"{name} grew by {mib:.1f} MiB, more than {most_mib:g}"
            for name, mib in grown.items()
            if mib > most_mib
        ]


def repeated_lines(log: str) -> list[str]:
    """Warnings, errors and lines of the plugin that a process has logged more than once."""
    lines = (_STAMP.sub("", line).strip() for line in log.splitlines() if _LEVEL.search(line))
    return [line for line, times in Counter(lines).items() if times > 1]


def verdict(
    answers: Answers, counters: Counters, memory: Sequence[str], log: str, *, exact: bool
) -> list[str]:
    """What is wrong. `exact`: one request has one text, in whatever company it is computed."""
    found = [*_few("answers", answers.wrong), *counters.problems, *memory]
    if exact:
        found += _few("texts that differ", answers.different)
    found += _few("lines logged more than once", repeated_lines(log))
    if "Traceback" in log:
        found.append("the log has a traceback")
    return found


def _few(what: str, problems: Sequence[str]) -> list[str]:
    if not problems:
        return []
    named = "; ".join(problem[:300] for problem in problems[:_MOST_NAMED])
    return [f"{what}, {len(problems)} of them: {named}"]
