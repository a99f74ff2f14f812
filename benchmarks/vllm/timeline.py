#!/usr/bin/env python3
"""A timeline of one verification step with the plugin: our NVTX ranges between the GPU's kernels.

    python benchmarks/vllm/timeline.py --json benchmarks/results/h200/timeline.json

The engine and the requests of steps.py, with the plugin and few layers, eager: a replayed graph has
no ranges. Ranges come from a recorder that is attached to NVTX as Nsight Systems is, kernels and
the calls that launch them from torch's profiler, both with the time of day. A kernel belongs to the
range and to the part of the step in which it was launched: verify, sample (which commits) or draft.
Tracing costs time on the host: compare step times in steps.py. A drawing of the result is
docs/timeline.svg.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parents[2]
RECORDER = ROOT / "tests" / "cpp" / "profiling" / "injection" / "nvtx_recorder.cpp"
DOMAIN = "nwor_specpv"
OUR_KERNELS = "nwor"  # their namespace
STEPS = 8  # traced; one of them is kept
_MARK = "nwor_part "
_MOST_SHIFT_US, _MOST_HOLD = 100.0, 0.9


@dataclass(frozen=True)
class Span:
    """Microseconds of the trace's clock."""

    name: str
    begin: float
    end: float

    def holds(self, moment: float) -> bool:
        return self.begin <= moment <= self.end


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = attach(args.recorder, Path(folder))
        told, trace = run(args, Path(folder))
        found = told | timeline(trace, read_ranges(log, int(trace["baseTimeNanoseconds"])))
    text = json.dumps(found, separators=(",", ":")).replace("],[", "],\n[")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    show(found)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="or stories, smollm2, a path")
    parser.add_argument("--method", choices=("eagle3", "ngram"), default="eagle3")
    parser.add_argument("--layers", type=int, default=8, help="of llama-3.1-8b")
    parser.add_argument("--cell", default="8x8192", help="REQUESTSxCONTEXT")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--recorder", type=Path,
                        help=f"a library made of {RECORDER.name}; default: made anew")  # fmt: skip
    parser.add_argument("--json", default="", help="write the timeline there")
    return parser.parse_args(arguments)


# ---- recording ----


def attach(recorder: Path | None, folder: Path) -> Path:
    """The file of the ranges. A tool is looked for at a process' first range, never again."""
    log = folder / "ranges"
    os.environ["NVTX_INJECTION64_PATH"] = str(recorder or build_recorder(folder))
    os.environ |= {"NWOR_NVTX_LOG": str(log), "NWOR_NVTX_CLOCK": "1"}
    return log


def build_recorder(folder: Path) -> Path:
    site = Path(sysconfig.get_path("purelib"))
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *site.glob("nvidia/*")]
    include = next((h / "include" for h in homes if (h / "include" / "nvtx3").exists()), None)
    if include is None:
        raise SystemExit("no nvtx3 headers: set CUDA_HOME, or build the recorder and name it")
    library = folder / "librecorder.so"
    flags = ["-std=c++17", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run(["c++", *flags, str(RECORDER), "-o", str(library)], check=True)
    return library


def run(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was traced, and the trace."""
    import steps
    from engine_state import origin, worker_runner
    from kernels import trace_of
    from server_process import device

    batch, context = (int(part) for part in args.cell.split("x"))
    options = steps.parse(
        [
            f"--model={args.model}", f"--layers={args.layers}", f"--method={args.method}",
            f"--drafts={args.drafts}", f"--batch={batch}", f"--context={context}", "--profile",
            f"--cache-bytes={4 << 30 if steps.torch.cuda.is_available() else 64 << 20}",
        ]
    )  # fmt: skip
    side = steps.Side("nwor", steps.start(options, folder, nwor=True), 0.0)
    steps.pretend_prompts_are_cached(side)
    steps.fill_cache(side)
    mark_parts(worker_runner(side.llm))
    tokens = min(context, steps.most_context(options, side, batch))
    steps.add_requests(side, batch, tokens)
    steps.set_acceptance(side, args.acceptance)
    steps.run(side, steps.WARM_STEPS)
    trace = trace_of(lambda: steps.run(side, STEPS), host=True)
    layers = args.layers if args.model == "llama-3.1-8b" else 0
    told = origin() | {"device": device(), "model": args.model, "layers": layers}
    told |= {"batch": batch, "context": tokens, "drafts": args.drafts}
    return told | {"method": args.method, "acceptance": args.acceptance}, trace


def mark_parts(runner: Any) -> None:
    """Names the parts of a step in the trace."""
    from torch.profiler import record_function

    def wrap(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with record_function(_MARK + part):
                return inner(*args, **kwargs)

        setattr(owner, name, wrapped)

    wrap(runner, "execute_model", "verify")
    wrap(runner, "sample_tokens", "sample")
    speculator = getattr(runner, "speculator", None)
    if speculator is not None:
        wrap(speculator, "propose", "draft")
    else:  # model runner V1
        wrap(runner, "propose_draft_token_ids", "draft")


def read_ranges(log: Path, base: int) -> list[Span]:
    """Ours, in the order of their beginnings; those of other libraries are left out. `base`: the
    nanoseconds of the time of day at which the trace's clock is 0."""
    ctypes.CDLL(None).fflush(None)
    if not log.exists():
        raise SystemExit("no NVTX range was seen: the library was built without the CUDA toolkit")
    found, opened = [], []
    for line in log.read_text().splitlines():
        kind, domain, *words = line.split()
        if domain != DOMAIN or kind == "domain":
            continue
        moment = (int(words[-1]) - base) / 1e3
        if kind == "push":
            opened.append((words[0], moment))
        else:
            found.append(Span(*opened.pop(), moment))
    return sorted(found, key=lambda span: span.begin)


# ---- one step of it ----


def timeline(trace: dict[str, Any], ranges: Sequence[Span]) -> dict[str, Any]:
    """The step nearest to the middle that commits. Times are microseconds from its beginning."""
    from kernels import device_work

    events = trace["traceEvents"]
    marks = [span_of(event, _MARK) for event in events if is_mark(event)]
    marks.sort(key=lambda span: span.begin)
    launched = launches(events)
    kernels = [(span_of(event), launch_of(event, launched)) for event in device_work(events)]
    ours = sorted(moment for span, moment in kernels if f"{OUR_KERNELS}::" in span.name)
    ranges = aligned(ranges, ours)
    step = committing([mark.begin for mark in marks if mark.name == "verify"], ranges)
    begin, end = step.begin, step.end

    def innermost(spans: Sequence[Span], moment: float) -> str:
        inside = [span for span in spans if span.holds(moment)]
        return min(inside, key=lambda span: span.end - span.begin).name if inside else ""

    def row(span: Span, *more: str) -> list[Any]:
        return [span.name, round(span.begin - begin, 1), round(span.end - span.begin, 1), *more]

    rows = []
    for span, moment in kernels:
        if step.holds(moment):
            name = Span(brief(span.name), span.begin, span.end)
            rows.append(row(name, innermost(marks, moment), innermost(ranges, moment)))
    return {
        "step_us": round(end - begin, 1),
        "parts": [row(mark) for mark in marks if step.begin <= mark.begin < step.end],
        "ranges": [row(one) for one in ranges if step.begin <= one.begin < step.end],
        "kernels": rows,
    }


def committing(starts: Sequence[float], ranges: Sequence[Span]) -> Span:
    steps = [Span("step", *both) for both in itertools.pairwise(starts)]
    commits = [one.begin for one in ranges if one.name == "nwor.commit"]
    found = [one for one in enumerate(steps) if any(map(one[1].holds, commits))]
    if not found:
        raise SystemExit(f"none of {len(steps)} steps commits")
    return min(found, key=lambda one: abs(one[0] - len(steps) / 2))[1]


def is_mark(event: dict[str, Any]) -> bool:
    named = str(event.get("name", "")).startswith(_MARK)
    return named and event.get("ph") == "X" and event.get("cat") == "user_annotation"


def span_of(event: dict[str, Any], prefix: str = "") -> Span:
    return Span(event["name"].removeprefix(prefix), event["ts"], event["ts"] + event["dur"])


def launches(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """When the host launched work, by the number that kernels are known by."""
    calls = (e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    return {e["args"]["correlation"]: e["ts"] for e in calls if "correlation" in e.get("args", {})}


def launch_of(event: dict[str, Any], launched: dict[int, float]) -> float:
    """The work itself where no launch is known, as on a CPU."""
    return launched.get(event.get("args", {}).get("correlation"), event["ts"])


def aligned(ranges: Sequence[Span], ours: Sequence[float]) -> list[Span]:
    """The ranges on the profiler's clock, which may be some microseconds off. `ours`: when our
    kernels were launched, in their order; most ranges have a launch inside."""
    if not ours:  # of a device
        return list(ranges)
    seen = [one for one in ranges if ours[0] - _MOST_SHIFT_US <= one.end]
    seen = [one for one in seen if one.begin <= ours[-1] + _MOST_SHIFT_US]
    if not seen:
        raise SystemExit("no range was opened while the profiler was on")

    def holding(shift: float) -> float:
        return statistics.fmean(any(one.holds(m - shift) for m in ours) for one in seen)

    middles = [(one.begin + one.end) / 2 for one in seen]
    shift = statistics.median(min((m - one for m in ours), key=abs) for one in middles)
    best = max((0.0, shift), key=holding)
    if abs(best) > _MOST_SHIFT_US or holding(best) < _MOST_HOLD:
        raise SystemExit(f"the clocks of ranges and kernels differ, by {shift:.0f} us or more")
    print(f"ranges were moved by {best:.1f} us to the profiler's clock", file=sys.stderr)
    return [Span(one.name, one.begin + best, one.end + best) for one in seen]


def brief(name: str) -> str:
    """A kernel's name without its arguments, or what a template of that name is about."""
    if name.startswith("Mem"):  # copies and fills
        return name.partition(" (")[0]
    name = re.sub(r"\(anonymous namespace\)::|^void ", "", name)
    words = re.findall(r"[A-Za-z_][\w:]*", name)
    plain = words[0] if words else name
    if plain.endswith(("device_kernel", "elementwise_kernel", "kernel_impl")) and len(words) > 1:
        known = (w for w in words[1:] if re.search(r"Flash|Functor|Op\b|_kernel|Gemm|gemm", w))
        plain = next(known, plain)
    return plain.removeprefix("at::native::").removeprefix("nwor::")[:48]


def show(found: dict[str, Any]) -> None:
    by_name: dict[str, list[float]] = {}
    for name, _, us in found["ranges"]:
        by_name.setdefault(name, []).append(us)
    print(f"a step of {found['step_us']:.0f} us on the host, {len(found['kernels'])} kernels")
    for name, spans in by_name.items():
        print(f"  {name}: {len(spans)} times, {statistics.median(spans):.1f} us on the host")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
