#!/usr/bin/env python3
"""Where the time of a step goes in mode `lossless`, with real weights and text, on a GPU.

    python benchmarks/vllm/pass_profile.py --model FOLDER --cell 24x30720 --passes 3 --json FILE

An engine of real.py takes steps with a fixed number of partial passes. torch's profiler traces some
of them, replayed graphs included. Every kernel belongs to the part of the step that launched it:
the verification (`verify`), vLLM's sampler (`sample`), each part of a proposal (`first`, `kept`,
`later`, `close`), and what the proposal does around them (`propose`). Tracing costs time: compare
parts here and steps in real.py.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import real
import real_engine
import real_prompts
from kernels import device_work, short, traced
from real_measure import Answer, Bench, Size

_MARK = "nwor_part "
_WARM_STEPS = 8


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cell", default="24x30720", help="REQUESTSxCONTEXT")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--top", type=int, default=12, help="kernels of a part")
    parser.add_argument("--json", default="")
    own, rest = parser.parse_known_args(arguments)
    rest += ["--out", tempfile.mkdtemp(), "--cells", own.cell, "--prompts", "question"]
    args = real.parse([*rest, "--temperatures", str(own.temperature)])
    real.resolve_model(args)
    args.set = {"specpv_draft_passes": own.passes} | args.set
    result = run(args, own)
    show(result, own.top)
    if own.json:
        Path(own.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def run(args: argparse.Namespace, own: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    os.environ.update(real_engine.environment("lossless", os.environ))
    cell = args.cells[0]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = real_prompts.Prompts(tokenizer, real_prompts.read_text(args.text))
    llm, told = real_engine.start("lossless", args, args.cells)
    bench = Bench(llm, [], plugin=True)
    size = Size(args.tokens, 0, args.cell_seconds)
    bench.even_prefill(cell.requests)
    answers = bench.add(
        prompts.make(cell.prompt, cell.requests, cell.context - size.room),
        cell.temperature, size, logprobs=False,
    )  # fmt: skip
    mark_parts()
    while not all(answer.tokens for answer in answers.values()):
        bench.step(answers)
    step(bench, answers, _WARM_STEPS)
    found = by_part(traced(lambda: step(bench, answers, own.steps), host=True), own.steps)
    return {"engine": told, "cell": str(cell), "passes": own.passes} | found


def step(bench: Bench, answers: dict[str, Answer], count: int) -> None:
    for _ in range(count):
        bench.step(answers)


def mark_parts() -> None:
    """Names the parts of a step in the trace."""
    from torch.profiler import record_function
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from nwor_specpv.vllm.specpv.proposals import PassProposals
    from nwor_specpv.vllm.specpv.self_speculator import SelfSpeculator
    from nwor_specpv.vllm.specpv.speculator import PartialViewSpeculator

    def wrap(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            label = part or args[0]
            with record_function(_MARK + label):
                return inner(self, *args, **kwargs)

        setattr(owner, name, wrapped)

    wrap(GPUModelRunner, "execute_model", "verify")
    wrap(GPUModelRunner, "sample_tokens", "sample")
    for owner in (SelfSpeculator, PartialViewSpeculator):
        wrap(owner, "propose", "propose")
    wrap(PassProposals, "_run", "")


def by_part(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Kernels by the innermost part whose time on the host has their launch."""
    marks = sorted(
        (e["ts"], -e["dur"], e["name"].removeprefix(_MARK))
        for e in events
        if e.get("ph") == "X" and e["name"].startswith(_MARK) and e.get("cat") == "user_annotation"
    )
    starts = [start for start, _, _ in marks]

    def part_of(ts: float) -> str:
        for start, length, name in reversed(marks[: bisect.bisect_right(starts, ts)]):
            if ts <= start - length:
                return name
        return "host"

    launches = {
        e["args"]["correlation"]: part_of(e["ts"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    work = device_work(events)
    parts: dict[str, dict[str, Any]] = {}
    reached = work[0]["ts"]
    for event in work:
        name = launches.get(event["args"].get("correlation"), "unknown")
        part = parts.setdefault(
            name, {"us": 0.0, "idle_us": 0.0, "kernels": collections.defaultdict(lambda: [0, 0.0])}
        )
        end = event["ts"] + event["dur"]
        part["us"] += max(0.0, end - max(reached, event["ts"])) / steps
        part["idle_us"] += max(0.0, event["ts"] - reached) / steps
        entry = part["kernels"][short(event["name"])]
        entry[0] += 1 / steps
        entry[1] += event["dur"] / steps
        reached = max(reached, end)
    counts = collections.Counter(name for _, _, name in marks)
    for name, part in parts.items():
        part["times_per_step"] = counts[name] / steps
        part["kernels"] = dict(sorted(part["kernels"].items(), key=lambda item: -item[1][1]))
    return {"span_us": (reached - work[0]["ts"]) / steps, "parts": parts}


def show(result: dict[str, Any], top: int) -> None:
    print(f"{result['cell']}: a step takes {result['span_us']:.0f} us on the device, traced")
    for name, part in sorted(result["parts"].items(), key=lambda item: -item[1]["us"]):
        print(f"{name}: {part['us']:.0f} us busy, {part['idle_us']:.0f} us idle before, "
              f"{part['times_per_step']:.1f} times a step")  # fmt: skip
        for kernel, (count, us) in list(part["kernels"].items())[:top]:
            print(f"    {us:9.1f} us  {count:7.1f} launches  {us / count:8.2f} us each  {kernel}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
