"""Verify attention on a CUDA device against its peers: the shapes of speculative verification.

    python benchmarks/attention_gpu.py [--json FILE]
        [--sections k1,odd,ragged,view,compact,fp8,rows64,models,torch,sustained]
    python benchmarks/attention_gpu.py --shapes 1x4608,8x32768 --rows 8,16,64 [--json FILE]
    python benchmarks/attention_gpu.py --sections errors [--json FILE]

Protocol: K/V sets of at least 300 MB in turn, shuffled pages of 16 tokens, all calls of a variant
in one CUDA graph, variants alternating, the median of --replays replays with the range of the
middle 80 % in brackets. Ahead of each replay the L2 is filled with something else: variants read
the same tokens, and some leave the ends of all requests there for the next one. Every row is
checked against float64 in the same run: mean, root mean square and maximum over all rows and heads
of the shortest and the longest request of one set; one that is wrong is not timed, and if it is
ours nothing is. A peer that is not there is named, with the reason. Peers compute a chain, as they
have no tree mask, but for FlashInfer's, which has one.

The section models has the heads of small models. The section torch has peers inside torch beside
the others, over contiguous K/V: LibTorch's FlashAttention-2, and, for trees, SDPA with a boolean
mask and compiled flex attention.

In the section sustained every variant runs for three seconds without a pause, and the second half
of them counts: that is where a device meets its power limit. Clocks and power are read meanwhile.

The section errors does that check alone, for every shape of the others and for float16 and other
head sizes: no timings, one K/V set.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from attention_inputs import (
    HEADS,
    KV_HEADS,
    PAGE,
    Bench,
    Case,
    Errors,
    Set,
    cases_of,
    measured_with,
)
from attention_peers import PEERS, find_peers
from gpu_clocks import Clocks

from nwor_specpv.bench.timing import Timing, capture, cold_l2, time_graphs
from nwor_specpv.ops.attention import last_route

GOALS_US = {
    (1, 4608): 10.0,
    (8, 4608): 40.0,
    (32, 4608): 140.0,
    (1, 32768): 37.0,
    (8, 32768): 244.0,
    (32, 32768): 960.0,
    (1, 131072): 127.0,
}
SECTIONS = (
    "k1", "odd", "ragged", "view", "compact", "fp8", "rows64", "models", "torch", "sustained"
)  # fmt: skip
SUSTAINED_SECONDS = 3.0
SUSTAINED_SAMPLES = 20  # of the second half
OF_TORCH = ("FA2", "SDPA tree", "flex tree")
KINDS = ("mean", "rms", "max")
WRONG = 5e-3  # ten times what 16 bits make of values of at most a tenth
ERRORS_OF = "all rows and heads of the shortest and the longest request of one K/V set"


def cases(sections: Sequence[str]) -> list[Case]:
    found: list[Case] = []
    if "k1" in sections:
        for (batch, length), goal in GOALS_US.items():
            for rows in (1, 4, 8, 16):
                found.append(Case("k1", (length,) * batch, rows, goal_us=goal))
    if "odd" in sections:
        for batch in (4, 5, 6, 7, 9, 10, 13, 17, 20, 27, 33, 40):
            goal = batch * 32768 * 4096 / 4.1e6
            found.append(Case("odd", (32768,) * batch, 8, goal_us=goal))
    if "ragged" in sections:
        lens = (32768,) * 4 + (2048,) * 28
        found.append(Case("ragged", lens, 8, goal_us=sum(lens) * 4096 / 4.0e6))
    if "view" in sections:
        for batch, goal in ((1, 10.0), (8, 40.0), (32, 140.0)):
            found.append(Case("view", (4608,) * batch, 8, view=True, goal_us=goal))
    if "compact" in sections:
        for batch in (1, 8, 32):
            found.append(Case("compact", (4608,) * batch, 8, compact=True))
    if "fp8" in sections:
        for batch, length in ((8, 32768), (1, 32768), (32, 4608)):
            for rows in (1, 4, 5, 8, 16):
                found.append(Case("fp8", (length,) * batch, rows))
                found.append(Case("fp8", (length,) * batch, rows, cache="float8_e4m3fn"))
    if "rows64" in sections:
        for (batch, length), goal in (
            ((1, 4608), 22.3),
            ((1, 32768), 68.0),
            ((8, 32768), 444.0),
            ((1, 131072), 229.0),
        ):
            found.append(Case("rows64", (length,) * batch, 64, goal_us=goal))
    if "models" in sections:
        # Qwen2.5-0.5B, Qwen2.5-1.5B, SmolLM2-135M.
        for heads, kv_heads, head_dim in ((14, 2, 64), (12, 2, 128), (9, 3, 64)):
            kind = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            for batch, length in ((1, 4608), (8, 4608), (32, 4608), (8, 32768)):
                for rows in (1, 5, 16):
                    found.append(Case("models", (length,) * batch, rows, **kind))
    if "torch" in sections:
        for batch, length, rows in ((1, 32768, 8), (8, 32768, 8), (8, 4608, 16), (8, 32768, 64)):
            found.append(Case("torch", (length,) * batch, rows))
    if "sustained" in sections:
        found.append(Case("sustained", (32768,) * 32, 8, goal_us=960.0))
    return found


def cases_of_errors() -> list[Case]:
    """Every shape there is, and a few of other dtypes and head sizes."""
    others = [
        Case("errors", lens, rows, dtype, dtype, head_dim)
        for dtype, head_dim in itertools.product(
            ("float16", "bfloat16"), (64, 80, 96, 128, 192, 256)
        )
        if (dtype, head_dim) != ("bfloat16", 128)
        for lens, rows in (((4608,) * 2, 1), ((4608,) * 2, 8), ((32768,), 16), ((4608,) * 2, 64))
    ]
    return cases([name for name in SECTIONS if name not in ("torch", "sustained")]) + others


def variants_of(bench: Bench, peers: dict) -> dict[str, Callable[[Set], object]]:
    variants: dict[str, Callable[[Set], object]] = {
        "ours": lambda s: bench.ours(s, False),
        "ours tree": lambda s: bench.ours(s, True),
    }
    for name, call in peers.items():
        variants[name] = lambda s, call=call: call(bench, s)
    return variants


def find_errors(bench: Bench, name: str, run: Callable[[Set], object]) -> Errors | None:
    """None: what the variant gives is not comparable with ours."""
    if name.startswith("ours"):
        return bench.errors(run, name.endswith("tree"))
    compared = PEERS[name][1]
    return None if compared is None else bench.errors(run, compared == "tree")


def time_sustained(graph: torch.cuda.CUDAGraph, calls: int) -> Timing:
    """Replays the graph without a pause; the second half counts.

    By then a device that runs into its power limit has slowed down.
    """
    # As many replays as one sample takes, by a short run.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    sample_ms = SUSTAINED_SECONDS * 1000 / (2 * SUSTAINED_SAMPLES)
    count = max(1, round(sample_ms / (start.elapsed_time(end) / 10)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * SUSTAINED_SAMPLES + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(count):
            graph.replay()
        mark.record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(marks[SUSTAINED_SAMPLES:])
    return Timing.of([one.elapsed_time(other) * 1000 / (count * calls) for one, other in pairs])


def measure(case: Case, peers: dict, replays: int, seed: int) -> dict:
    """One shape; without replays its errors alone."""
    bench = Bench(case, seed, most_sets=None if replays else 1)
    errors: dict[str, Errors] = {}
    routes: dict[str, str] = {}
    left_out: dict[str, str] = {}
    graphs, calls = {}, {}
    for name, run in variants_of(bench, peers).items():

        def all_sets(run=run) -> None:
            for i in range(bench.calls):
                run(bench.sets[i % len(bench.sets)])

        try:
            found = find_errors(bench, name, run)
            if found is not None:
                errors[name] = found
                if not found.max <= WRONG:
                    raise AssertionError(f"{case}: {name} is off by {found.max}")
            if name.startswith("ours"):
                routes[name] = last_route()
            if replays:
                graphs[name] = capture(all_sets)
                calls[name] = bench.calls
        except NotImplementedError as error:
            left_out[name] = str(error)
        except Exception as error:
            if name.startswith("ours"):
                raise
            left_out[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    timings: dict[str, Timing] = {}
    clocks: dict[str, dict] = {}
    if replays and case.section == "sustained":
        for name, graph in graphs.items():
            with Clocks() as read:
                timings[name] = time_sustained(graph, calls[name])
            clocks[name] = read.found
    elif replays:
        timings = time_graphs(graphs, calls, replays, before=cold_l2())
    return {
        "case": asdict(case),
        "name": case.name,
        "kv_bytes": bench.bytes,
        "timings": {name: asdict(t) for name, t in timings.items()},
        "errors": {name: found.max for name, found in errors.items()},
        "error_stats": {name: asdict(found) for name, found in errors.items()},
        "routes": routes,
        "left_out": left_out,
    } | ({"clocks": clocks} if clocks else {})


def label(result: dict) -> str:
    case = result["case"]
    name = result["name"] + (" view" if case["view"] else "")
    name += " compact" if case["compact"] else ""
    if case["section"] == "sustained":
        name += " sustained"
    if (case["heads"], case["kv_heads"]) != (HEADS, KV_HEADS):
        name += f" {case['heads']}/{case['kv_heads']}"
    if (case["dtype"], case["head_dim"]) != ("bfloat16", 128):
        name += f" {case['dtype']} D {case['head_dim']}"
    return name + (" fp8" if case["cache"].startswith("float8") else "")


def error_row(result: dict) -> str:
    stats = result["error_stats"]

    def shown(name: str) -> str:
        if name not in stats:
            return f"{'-':<27}"
        return "".join(f"{stats[name][kind]:<9.1e}" for kind in KINDS)

    ratios = "-"
    if "FA3" in stats:
        ratios = " ".join(f"{stats['ours'][kind] / stats['FA3'][kind]:.3f}" for kind in KINDS)
    columns = "".join(shown(name) for name in ("ours", "ours tree", "FA3"))
    return f"{label(result):<24}{result['case']['rows']:>5}  {columns}{ratios}"


def row(result: dict) -> str:
    case, timings = result["case"], result["timings"]
    us = {name: t["median_us"] for name, t in timings.items()}

    def shown(name: str) -> str:
        if name not in timings:
            return "-"
        t = timings[name]
        return str(Timing(t["median_us"], t["spread_us"], t["replays"]))

    ours = us["ours"]
    ratio = f"{ours / us['FA3']:.2f}" if "FA3" in us else "-"
    floor = f"{100 * us['read'] / ours:.1f} %" if "read" in us else "-"
    errors = result["errors"]
    error = f"{errors['ours']:.1e}" if "ours" in errors else "-"
    if "FA3" in errors:
        error += f" (FA3 {errors['FA3']:.1e})"
    goal = case["goal_us"]
    mark = "" if goal is None else f"{goal:.0f} {'met' if ours <= goal else 'missed'}"
    of_torch = "".join(f"  {name} {shown(name)}" for name in OF_TORCH if name in timings)
    return (
        f"{label(result):<24}{case['rows']:>5}  {shown('ours'):<17}{shown('FA3'):<17}"
        f"{shown('FA2 folded'):<17}{shown('FlashInfer'):<17}{shown('FlashInfer tree'):<19}"
        f"{ratio:<10}{floor:<15}{us['ours tree'] / ours:<12.3f}"
        f"{result['kv_bytes'] / ours / 1e6:<7.2f}{mark:<13}{error}{of_torch}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS), help="or errors, alone")
    parser.add_argument("--shapes", help="BxL,... with --rows, instead of sections")
    parser.add_argument("--rows", default="8,16,64")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--peers", default=",".join(PEERS), help="by name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if unknown := set(options.peers.split(",")) - set(PEERS):
        parser.error(f"--peers: got {sorted(unknown)}, expected some of {list(PEERS)}")
    faulthandler.enable()  # a process that a fault ends says where it was
    sections = options.sections.split(",")
    errors_only = sections == ["errors"]
    if not errors_only and not set(sections) <= set(SECTIONS):
        parser.error(f"--sections: got {options.sections}, expected some of {SECTIONS}, or errors")
    if not torch.cuda.is_available():
        print("attention_gpu: no CUDA device", file=sys.stderr)
        return 1
    peers, missing = find_peers(options.peers.split(","))
    environment = measured_with() | {
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "seed": options.seed,
        "missing_peers": missing,
        "errors_of": ERRORS_OF,
    }
    print(
        f"device {environment['device']} · torch {torch.__version__}"
        f" · commit {environment['commit']}"
        f" · bf16, {HEADS}/{KV_HEADS} heads, D 128, page {PAGE} shuffled"
        f" · median of {options.replays}, spread in brackets · seed={options.seed}"
    )
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    if errors_only:
        kinds = "".join(f"{name + ' ' + kind:<9}" for name in ("", "tree", "FA3") for kind in KINDS)
        print(f"{'B x L':<24}{'rows':>5}  {kinds}ours / FA3")
    else:
        print(
            f"{'B x L':<24}{'rows':>5}  {'ours us':<17}{'FA3 us':<17}{'FA2 folded us':<17}"
            f"{'FlashInfer us':<17}{'FlashInfer tree us':<19}"
            f"{'ours/FA3':<10}{'of read floor':<15}{'tree/chain':<12}{'TB/s':<7}"
            f"{'goal us':<13}max err (fp64)"
        )
    results = []
    if options.shapes:
        chosen = cases_of("shapes", options.shapes, options.rows)
    else:
        chosen = cases_of_errors() if errors_only else cases(sections)
    for case in chosen:
        result = measure(case, peers, 0 if errors_only else options.replays, options.seed)
        results.append(result)
        print(error_row(result) if errors_only else row(result), flush=True)
        torch.cuda.empty_cache()
        if options.json:  # after every case: a run that is cut short keeps what it has
            document = {"environment": environment, "results": results}
            options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
