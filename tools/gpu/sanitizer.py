"""compute-sanitizer: its command, and what it has said of which test."""

from __future__ import annotations

import re
from typing import NamedTuple

CHECKS = ("memcheck", "racecheck", "synccheck")
_BARRIERS = ("--num-cuda-barriers", "65536", "--force-synchronization-limit", "16")
_FOUND = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_SAID = re.compile(r"(?<!=)={9} (?! )(?!COMPUTE-SANITIZER|.* SUMMARY:|Target )(.+)")
_UNSEEN = "Internal Sanitizer Error"  # of the tool itself, though its summary counts it
_MOST = 20  # findings of a process that are kept
# torch's caching would hide accesses beyond a tensor, but graphs cannot be captured without it.
CAPTURES = re.compile(r"graph|captur|bench")
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


class Report(NamedTuple):
    findings: list[tuple[str | None, str]]  # the test in which it came, and the first line
    unseen: list[str | None]  # tests with launches that were not checked, a name for each
    complete: bool  # the sanitizer has printed its summary


def command(check: str) -> list[str]:
    """What comes before the program. Our kernels only are checked."""
    return [
        *("compute-sanitizer", "--tool", check, "--kernel-name", "kns=nwor"),
        # To know the host's stack it keeps frames of Python, and with them their objects.
        *("--show-backtrace", "device"),
        # It has memory for so many barriers of every launch that nobody has waited for.
        *(_BARRIERS if check == "synccheck" else ()),
        *("--print-limit", "10000", "--error-exitcode", "9"),
    ]


def read(text: str, tests: list[str]) -> Report:
    """What a process has printed."""
    findings: list[tuple[str | None, str]] = []
    unseen: list[str | None] = []
    current = None
    for line in text.splitlines():
        # Of test_a[1] and test_a[1]b the longer one; lines of tracebacks are none.
        current = max((t for t in tests if line.startswith(f"{t} ")), key=len, default=current)
        said = _SAID.search(line)
        if said and said[1].startswith(_UNSEEN):
            unseen.append(current)
        elif said:
            findings.append((current, said[1]))
    summaries = [int(errors or hazards) for errors, hazards in _FOUND.findall(text)]
    count = sum(summaries) - len(unseen)
    if count <= 0:  # what it has said were no errors
        findings = []
    elif not findings:
        findings = [(None, f"{count} findings of which it says nothing else")]
    return Report(findings[:_MOST], unseen, bool(summaries))
