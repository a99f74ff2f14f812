#!/usr/bin/env python3
"""Where the time of a step goes in mode `lossless`, with real weights and text, on a GPU.

    python benchmarks/vllm/pass_profile.py --model FOLDER --cell 24x30720 --json FILE
    python benchmarks/vllm/pass_profile.py --model FOLDER --arms 0x0 2x8 2x16 --temperature 0 0.6

An engine of real.py takes steps of one arm after the other: so many partial passes, and so many
drafts that the next step verifies, in rows one more than drafts. All arms begin with the same
prompts, which are computed once. Steps are timed, then torch's profiler traces some more, replayed
graphs included. Every kernel belongs to the part of the step that launched it: the verification
(`verify`), vLLM's sampler (`sample`), each part of a proposal (`first`, `kept`, `later`, `close`),
and what the proposal does around them (`propose`); and to a group by what it does. Tracing slows
the host: the gaps of a step are its time without the tracer less what kernels were busy.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
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
# Verification of 5, 9, 13 and 17 rows with passes that stay the same, then other numbers of passes.
_ARMS = ("0x0", "0x4", "2x4", "2x8", "2x12", "2x16", "1x8", "3x8", "3x16", "4x16")
_PASSES = ("first", "kept", "later")  # parts with a pass, whose last product are logits
# Kernels by what they do. The first that fits counts.
_GROUPS = (
    ("writes", r"\b(StageKernel|CommitKernel|SmallCommitKernel|DigestKernel)\b|reshape_and_cache"),
    ("attention", r"\b(VerifyKernel|MergeStatesKernel|MergeRowsKernel|PlanKernel)\b|flash"),
    ("choice", r"\b(SummarizeKernel|\w+ScoreKernel|TakeHighestKernel|BuildViewKernel)\b"),
    ("lookup", r"\b(ScanKernel|GuessKernel)\b"),
    (
        "sampling",
        r"TargetProbsKernel|LikeliestKernel|CertainLogitsKernel|argmax|gumbel|logits|rejection|"
        r"resample|ArgMax",
    ),
    ("products", r"gemm|gemv|nvjet|cutlass|cublas|splitK|xmma"),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cell", default="24x30720", help="REQUESTSxCONTEXT")
    parser.add_argument("--arms", nargs="+", default=_ARMS, help="PASSESxDRAFTS")
    parser.add_argument("--temperature", nargs="+", default=["0"])
    parser.add_argument("--timed", type=int, default=16, help="steps without the tracer")
    parser.add_argument("--steps", type=int, default=6, help="steps with it")
    parser.add_argument("--top", type=int, default=12, help="kernels of a part")
    parser.add_argument("--json", default="")
    own, rest = parser.parse_known_args(arguments)
    rest += ["--out", tempfile.mkdtemp(), "--cells", own.cell, "--prompts", "question"]
    args = real.parse([*rest, "--share-prompts", "--temperatures", *own.temperature])
    real.resolve_model(args)
    arms = [tuple(map(int, arm.split("x"))) for arm in own.arms]
    result: dict[str, Any] = {"cell": own.cell, "model": args.model_name, "steps": own.timed}
    for told in profiles(args, own, arms, result):
        show(told)
        if own.json:
            Path(own.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def profiles(
    args: argparse.Namespace,
    own: argparse.Namespace,
    arms: list[tuple[int, int]],
    result: dict[str, Any],
) -> Iterable[dict[str, Any]]:
    """Each arm at each temperature, as it is added to `result["arms"]`."""
    from transformers import AutoTokenizer

    os.environ.update(real_engine.environment("lossless", os.environ))
    requests = args.cells[0].requests
    drafts = sorted({number for _, number in arms})
    offer_drafts(drafts)
    graphs = {"cudagraph_capture_sizes": sorted({requests * (1 + n) for n in (0, *drafts)})}
    args.engine["lossless"] = {"compilation_config": graphs} | args.engine.get("lossless", {})
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = real_prompts.Prompts(tokenizer, real_prompts.read_text(args.text))
    llm, told = real_engine.start("lossless", args, args.cells)
    if drafts[-1] > told["drafts"]:
        raise SystemExit(f"--arms: this engine drafts {told['drafts']} tokens at most")
    result |= {name: told[name] for name in ("device", "commit", "torch", "vllm", "dtype")}
    result |= {"engine": told, "arms": []}
    size = Size(args.tokens, 0, args.cell_seconds)
    bench = Bench(llm, [], plugin=True)
    bench.even_prefill(requests)
    mark_parts()
    for cell in args.cells:
        texts = prompts.make(cell.prompt, cell.requests, cell.context - size.room)
        for passes, number in arms:
            take(llm, passes, number)
            answers = bench.add(texts, cell.temperature, size, logprobs=False)
            found = profile(bench, answers, own)
            bench.finish(list(answers))
            known = {"passes": passes, "drafts": number, "temperature": cell.temperature}
            result["arms"].append(known | found)
            yield result["arms"][-1]


def offer_drafts(numbers: Iterable[int]) -> None:
    """Engines to come have CUDA graphs for these numbers of drafts, too."""
    from nwor_specpv.vllm.specpv.lengths import Lengths

    own = Lengths.drafts.fget
    Lengths.drafts = property(lambda lengths: tuple(sorted({*own(lengths), *numbers})))


def take(llm: Any, passes: int, drafts: int) -> None:
    """Steps to come are of this arm."""
    from nwor_specpv.arms import Arm

    decisions = llm.llm_engine.engine_core.engine_core.scheduler.decisions
    decisions.fixed_arm = lambda longest: Arm(drafts, passes)


def profile(bench: Bench, answers: dict[str, Answer], own: argparse.Namespace) -> dict[str, Any]:
    import torch

    def steps(count: int) -> None:
        for _ in range(count):
            bench.step(answers)
        torch.cuda.synchronize()

    while not all(answer.tokens for answer in answers.values()):
        bench.step(answers)
    steps(_WARM_STEPS)
    before, began = sum(len(answer.tokens) for answer in answers.values()), time.perf_counter()
    steps(own.timed)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer.tokens) for answer in answers.values()) - before
    told = {
        "step_ms": 1e3 * seconds / own.timed,
        "tokens_per_step": tokens / own.timed / len(answers),
    }
    found = by_part(traced(lambda: steps(own.steps), host=True), own.steps)
    for part in found["parts"].values():
        part["kernels"] = dict(list(part["kernels"].items())[: own.top])
    return told | found


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

    def mark_of(ts: float) -> int:
        for index in range(bisect.bisect_right(starts, ts) - 1, -1, -1):
            start, length, _ = marks[index]
            if ts <= start - length:
                return index
        return -1

    launches = {
        e["args"]["correlation"]: mark_of(e["ts"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    work = device_work(events)
    owners = [launches.get(event["args"].get("correlation")) for event in work]
    names = ["unknown" if i is None else marks[i][2] if i >= 0 else "host" for i in owners]
    groups = [group_of(event["name"], name) for event, name in zip(work, names, strict=True)]
    last = {owner: index for index, owner in enumerate(owners) if groups[index] == "products"}
    for index in last.values():
        if names[index] in _PASSES:
            groups[index] = "logits"
    parts: dict[str, dict[str, Any]] = {}
    reached = work[0]["ts"]
    for event, name, group in zip(work, names, groups, strict=True):
        part = parts.setdefault(
            name,
            {
                "us": 0.0,
                "idle_us": 0.0,
                "groups": collections.Counter(),
                "kernels": collections.defaultdict(lambda: [0, 0.0]),
            },
        )
        end = event["ts"] + event["dur"]
        busy = max(0.0, end - max(reached, event["ts"])) / steps
        part["us"] += busy
        part["groups"][group] += busy
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


def group_of(kernel: str, part: str) -> str:
    """What a kernel does. Beside its products vLLM's sampler has nothing but sampling."""
    found = next((name for name, pattern in _GROUPS if re.search(pattern, kernel)), "rest")
    if part == "sample":
        return {"products": "logits", "rest": "sampling"}.get(found, found)
    return found


def show(told: dict[str, Any]) -> None:
    busy = sum(part["us"] for part in told["parts"].values())
    print(f"{told['passes']} passes, {told['drafts']} drafts, temperature {told['temperature']:g}: "
          f"{told['step_ms']:.2f} ms a step, {told['tokens_per_step']:.2f} tokens; kernels "
          f"{busy / 1e3:.2f} ms; traced {told['span_us'] / 1e3:.2f} ms")  # fmt: skip
    for name, part in sorted(told["parts"].items(), key=lambda item: -item[1]["us"]):
        groups = ", ".join(f"{group} {us:.0f}" for group, us in part["groups"].most_common())
        print(f"  {name}: {part['us']:.0f} us busy ({groups}), {part['idle_us']:.0f} us idle "
              f"before, {part['times_per_step']:.1f} times a step")  # fmt: skip
        for kernel, (count, us) in part["kernels"].items():
            print(f"    {us:9.1f} us  {count:7.1f} launches  {us / count:8.2f} us each  {kernel}")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
