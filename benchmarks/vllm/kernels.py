#!/usr/bin/env python3
"""Which kernels a verification step launches, and how long each runs, with and without the plugin.

    python benchmarks/vllm/kernels.py --drafts 4 --cells 1x1024 8x8192 24x32768

The engines and requests of steps.py; some steps of each are traced by torch's profiler, replayed
graphs included. Per kernel: launches and microseconds per step, and microseconds each. `between`
is what no kernel covers. Tracing costs time, so compare kernels here and steps in steps.py.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import steps

# What torch's profiler calls work of the device.
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="or stories, smollm2, a path")
    parser.add_argument("--method", choices=("eagle3", "ngram"), default="eagle3")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--cells", nargs="+", default=["1x1024", "8x8192", "24x32768"])
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--least", type=float, default=4.0, help="microseconds worth a line")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    cells = [tuple(int(n) for n in cell.split("x")) for cell in args.cells]
    options = steps.parse(
        [
            f"--model={args.model}",
            f"--method={args.method}",
            f"--drafts={args.drafts}",
            "--batch", *(str(batch) for batch, _ in cells),
            "--context", *(str(context) for _, context in cells),
        ]
    )  # fmt: skip
    result = []
    with tempfile.TemporaryDirectory() as folder:
        sides = steps.start_both(options, Path(folder))
        for batch, context in cells:
            tokens = min(context, steps.most_context(options, sides[0], batch))
            for side in sides:
                steps.add_requests(side, batch, tokens)
                steps.set_acceptance(side, args.acceptance)
                steps.run(side, steps.WARM_STEPS)
                result.append(trace(side, args.steps) | {"batch": batch, "context": tokens})
            compare(result[-2], result[-1], args.least)
            for side in sides:
                steps.drop_requests(side)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1))
    return 0


def trace(side: steps.Side, count: int) -> dict[str, Any]:
    """Launches and microseconds per step, by kernel."""
    events = device_work(traced(lambda: steps.run(side, count)))
    kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    reached = events[0]["ts"]
    between = 0.0
    for event in events:
        entry = kernels[short(event["name"])]
        entry[0] += 1 / count
        entry[1] += event["dur"] / count
        between += max(0.0, event["ts"] - reached) / count
        reached = max(reached, event["ts"] + event["dur"])
    span = (reached - events[0]["ts"]) / count
    return {"side": side.name, "span_us": span, "between_us": between, "kernels": dict(kernels)}


def traced(work: Callable[[], None], *, host: bool = False) -> list[dict[str, Any]]:
    """What torch's profiler sees while `work` runs; with `host` what the host does, too."""
    return trace_of(work, host=host)["traceEvents"]


def trace_of(work: Callable[[], None], *, host: bool) -> dict[str, Any]:
    """The whole trace, as torch exports it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    if host or not activities:
        activities.append(ProfilerActivity.CPU)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=activities) as tracer:
            work()
        tracer.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def device_work(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels, copies and fills in their order."""
    found = sorted((e for e in events if e.get("cat") in KINDS), key=lambda event: event["ts"])
    if not found:
        raise SystemExit("the profiler saw no work of the device: kernels are counted on a GPU")
    return found


def short(name: str) -> str:
    """A kernel's name without most of its template arguments, which would fill a page."""
    name = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "")
    return name if len(name) < 60 else f"{name[:44]}..{name[-14:]}"


def compare(stock: dict[str, Any], nwor: dict[str, Any], least: float) -> None:
    print(f"{stock['batch']} x {stock['context']}: step {stock['span_us']:.1f} | "
          f"{nwor['span_us']:.1f} us, between kernels {stock['between_us']:.1f} | "
          f"{nwor['between_us']:.1f}")  # fmt: skip
    print("  launches a step    us a step           us each        stock | nwor")
    names = stock["kernels"].keys() | nwor["kernels"].keys()
    rows = [(n, *(s["kernels"].get(n, (0, 0.0)) for s in (stock, nwor))) for n in names]
    for name, (ours, us), (theirs, more) in sorted(rows, key=lambda r: r[1][1] - r[2][1]):
        if abs(us - more) < least and (ours > 0) == (theirs > 0):
            continue
        each = [f"{total / number:7.2f}" if number else "      -"
                for number, total in ((ours, us), (theirs, more))]  # fmt: skip
        print(
            f"  {ours:6.1f} | {theirs:6.1f}  {us:8.1f} | {more:8.1f}  {each[0]} |{each[1]}  {name}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
