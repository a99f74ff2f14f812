"""Steps of the transformers host whose K/V does not fit the memory that is set for it.

    python benchmarks/generate_offload.py --json FILE      # on a GPU, about 3 minutes

Shapes of two models with random weights and random K/V, and an acceptance that is set, as in
`generate_gpu.py`. Two caches hold the same K/V, one on the GPU and one in pinned host memory
(`specpv_offload`). Both run the same full steps, and the same steps with views in modes refresh and
lossless, in turn. Times are of whole steps. Every step has to choose the same tokens on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from generate_gpu import MODELS, Steps
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from nwor_specpv import CapacityError, NworConfig, SpecPVConfig, VerifyPolicy
from nwor_specpv.bench.report import machine
from nwor_specpv.cli.parser import count, counts
from nwor_specpv.transformers.runner import ModelRunner

WAYS = ("full", "refresh", "lossless")
SIDES = ("gpu", "host")  # where the cache is
_WARM = 2  # steps of a kind, or refreshes, that run without a graph or capture one


def load(name: str, layers: int, device: str) -> Any:
    sizes = dict(MODELS[name])
    if layers:
        sizes["num_hidden_layers"] = min(layers, sizes["num_hidden_layers"])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval()


def make_config(way: str, side: str, view_blocks: int) -> SpecPVConfig:
    storage = {"specpv_storage": "compact", "specpv_offload": True} if side == "host" else {}
    config = SpecPVConfig(enable_specpv=True, specpv_mode=way, **storage)
    if view_blocks:
        config.specpv_n_retrieval_blocks = view_blocks
    return config


def mean_of_cycles(kinds: list[str], times: list[float]) -> float | None:
    """Of a step, from refresh to refresh; None where too few are over."""
    refreshes = [i for i, kind in enumerate(kinds) if kind == "full_refresh"][_WARM:]
    if len(refreshes) < 2:
        return None
    return statistics.mean(times[refreshes[0] : refreshes[-1]])


def run_side(
    runner: ModelRunner, way: str, config: SpecPVConfig, shape: tuple[int, int], arguments: Any
) -> tuple[dict[str, Any], list]:
    """Times and bytes of some steps, and what they chose."""
    batch, context = shape
    steps = Steps(runner, batch, context, arguments.rows, arguments.accepted)
    views, policy, number = None, None, arguments.steps
    kinds: list[str] = []
    times: list[float] = []
    chosen = []
    with runner.installed():
        if way != "full":
            views, policy = steps.open_views(config, context), VerifyPolicy(config)
            number *= 3
        for _ in range(number):
            runner.synchronize()
            started = time.perf_counter()
            kind = steps.run(views, policy)
            runner.synchronize()
            times.append(time.perf_counter() - started)
            after_refresh = kind == "partial" and kinds[-1:] == ["full_refresh"]
            # There views are made: with compact storage their tokens are copied.
            kinds.append("first_partial" if after_refresh else kind)
            chosen.append(steps.chosen)
    steps.end()
    graphs = runner.cache.graphs
    if graphs is not None and views is not None:
        graphs.drop(views)
    ms = {}
    for kind in dict.fromkeys(kinds):
        of_kind = [t for k, t in zip(kinds, times, strict=True) if k == kind][_WARM:]
        if of_kind:
            ms[kind] = 1000 * statistics.median(of_kind)
    mean = mean_of_cycles(kinds, times)
    if mean is not None:
        ms["mean of cycles"] = 1000 * mean
    view_tokens = 0 if views is None else views.store.budget.static_tokens
    cache_bytes = runner.cache.keys.nbytes + runner.cache.values.nbytes
    result = {
        "ms": ms,
        "steps": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "gpu_bytes": {
            "cache": 0 if runner.offload else cache_bytes,
            "views and summaries": 0 if views is None else views.bytes,
        },
        "host_bytes": cache_bytes if runner.offload else 0,
        # Of K/V, by attention; what a view keeps is copied once in a first partial step.
        "read_bytes": {
            "full step": batch * context * runner.token_bytes,
            "partial step": batch * view_tokens * runner.token_bytes,
        },
    }
    return result, chosen


def refusal(model: Any, tokens: int, budget: int) -> str:
    """What a cache on the GPU is told under the budget."""
    try:
        ModelRunner(model, NworConfig(), gpu_cache_bytes=budget).reserve(tokens)
    except CapacityError as error:
        return str(error)
    raise SystemExit(f"--budget: got {budget}, expected less than K/V of {tokens} tokens take")


def measure(model: Any, shape: tuple[int, int], arguments: Any, device: str) -> dict[str, Any]:
    batch, context = shape
    told = refusal(model, batch * context, arguments.budget)
    runners = {
        "gpu": ModelRunner(model, NworConfig(), graphs=device == "cuda"),
        "host": ModelRunner(
            model,
            NworConfig(),
            graphs=device == "cuda",
            offload=True,
            gpu_cache_bytes=arguments.budget,
        ),
    }
    result = {"batch": batch, "context": context, "refused on the GPU": told, "rounds": []}
    differing = 0
    for number in range(arguments.rounds):
        found: dict[str, dict[str, Any]] = {}
        for way in WAYS:
            chosen = {}
            for side in SIDES:
                torch.manual_seed(number)  # the first of a side draws its K/V
                config = make_config(
                    way if way != "full" else "refresh", side, arguments.view_blocks
                )
                found.setdefault(way, {})[side], chosen[side] = run_side(
                    runners[side], way, config, shape, arguments
                )
            differing += chosen["gpu"] != chosen["host"]
        result["rounds"].append(found)
    result["runs whose tokens differ"] = differing
    return result


def describe(name: str, result: dict[str, Any]) -> str:
    lines = [f"{name} {result['batch']} x {result['context']}: {result['refused on the GPU']}"]
    for number, found in enumerate(result["rounds"]):
        for way in WAYS:
            for side in SIDES:
                one = found[way][side]
                times = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in one["ms"].items())
                on_gpu = sum(one["gpu_bytes"].values()) / 2**30
                lines.append(
                    f"  {number} {way}, cache on {side}: {times}; {on_gpu:.2f} GiB on the GPU, "
                    f"{one['host_bytes'] / 2**30:.2f} GiB in host memory"
                )
    lines.append(f"  runs whose tokens differ: {result['runs whose tokens differ']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="smollm2-135m,llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8, help="of llama-3.1-8b; 0: all")
    parser.add_argument("--contexts", type=counts, default=[32768])
    parser.add_argument("--batches", type=counts, default=[8])
    parser.add_argument("--budget", type=count, default=2 << 30, help="gpu_cache_bytes")
    parser.add_argument("--rows", type=count, default=8)
    parser.add_argument("--accepted", type=int, default=3)
    parser.add_argument("--steps", type=count, default=12, help="full ones; thrice with views")
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--view-blocks", type=int, default=0, help="retrieved; 0: the default 256")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda when there is one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    names = arguments.models.split(",")
    for name in names:
        if name not in MODELS:
            parser.error(f"--models: got {name!r}, expected some of {', '.join(MODELS)}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = ("budget", "rows", "accepted", "steps", "view_blocks")
    versions = {"transformers": transformers.__version__, "cuda": torch.version.cuda}
    report = machine(device) | versions | {name: getattr(arguments, name) for name in settings}
    report["models"] = {}
    differing = 0
    for name in names:
        layers = arguments.layers if name == "llama-3.1-8b" else 0
        model = None  # the last one's memory first
        model = load(name, layers, device)
        results: list[dict[str, Any]] = []
        report["models"][name] = {"shapes": model.config.to_diff_dict(), "results": results}
        for context in arguments.contexts:
            for batch in arguments.batches:
                results.append(measure(model, (batch, context), arguments, device))
                differing += results[-1]["runs whose tokens differ"]
                print(describe(name, results[-1]), flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
