#!/usr/bin/env python3
"""Time of a verification step with and without the plugin, over batch, context and acceptance.

    python benchmarks/vllm/steps.py --drafts 4 --json steps_4.json
    python benchmarks/vllm/steps.py --drafts 7 --first nwor --batch 8 --context 8192
    python benchmarks/vllm/steps.py --drafts 7 --compile off --add --json steps_4.json

Two engines with an 8B model's shapes and dummy weights live in one process and take turns: a few
steps of one, a few of the other, for every acceptance rate in turn. What a table of 72 cells would
spend on waiting is left out, none of it part of a step:

* prompts are not computed. The scheduler is told that all but the last block of a prompt is in the
  prefix cache; what stands in those blocks is noise. Lengths are real, and every request has blocks
  of its own.
* both engines use the same cache memory, each with a scheduler of its own, so that 24 long requests
  fit twice.
* acceptance is vLLM's synthetic one, each draft accepted with the given rate if those before it
  were; the rates are changed in place.

vLLM compiles and captures as it does by default. With `--compile off` it compiles nothing and
captures full graphs of the sizes at hand, so that starts are shorter.

A step's time is the wall time of some steps between two synchronisations, divided by them; the
median over turns is kept. Start-up is timed after an engine of few layers came and went, so that
neither side pays for what a process does once.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from offline import LLAMA_8B, eagle_head, resolve, write_config

from nwor_specpv import _stamp

BLOCK = 16 if torch.cuda.is_available() else 32  # what the CPU backend takes from vLLM 0.32 on
WARM_STEPS = 6
# Weights twice, activations, graphs; the rest of the device is cache.
RESERVED_BYTES = 42 << 30
WARM_CACHE_BYTES = 512 << 20


@dataclass
class Side:
    """One of the two engines, with the requests of the cell at hand."""

    name: str
    llm: Any
    start_s: float
    step_ms: list[float] = field(default_factory=list)

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler


def main() -> int:
    args = parse()
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    with tempfile.TemporaryDirectory() as folder:
        sides = start_both(args, Path(folder))
        starts = {side.name: round(side.start_s, 2) for side in sides}
        print(f"device {device} · torch {torch.__version__} · {args.model}, {args.method}, "
              f"{args.drafts} drafts · {args.turns} turns of {args.steps} steps")  # fmt: skip
        print("starts, in order:", ", ".join(f"{name} {s} s" for name, s in starts.items()))
        if args.profile:
            profile(args, sides)
            return 0
        print("B x L         acceptance   stock ms            nwor ms             nwor/stock")
        origin = {
            "device": device,
            "torch": torch.__version__,
            "vllm": vllm.version.__version__,
            "revision": _stamp.read_stamp().revision,
        }
        others = other_runs(args, origin)
        arguments = vars(args) | {"json": "", "add": False}
        result: dict[str, Any] = {"arguments": arguments, "start_s": starts, "cells": []}
        for context in args.context:
            for batch in args.batch:
                result["cells"] += measure(args, sides, batch, context)
                ratios = [cell["ratio"] for cell in result["cells"]]
                result["geometric_mean"] = math.exp(statistics.fmean(map(math.log, ratios)))
                result["worst"] = max(ratios)
                result["stats"] = staging_stats(sides)
                if args.json:
                    told = origin | {"runs": [*others, result]}
                    Path(args.json).write_text(json.dumps(told, indent=1))
        print(f"geometric mean {result['geometric_mean']:.4f}, worst {result['worst']:.4f}")
        stats = result["stats"]
        print(f"staged {stats['staged_tokens']} = committed {stats['committed_tokens']} + rejected "
              f"{stats['rejected_tokens']}; fallbacks {stats['fallbacks'] or 'none'}")  # fmt: skip
    return 0


def other_runs(args: argparse.Namespace, origin: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs in the file that stay there: of other drafts or another way to compile."""
    if not args.add or not Path(args.json).exists():
        return []
    known = json.loads(Path(args.json).read_text())
    if other := [name for name in origin if known[name] != origin[name]]:
        raise SystemExit(f"--add: {args.json} is of another {', '.join(other)}")
    own = (args.drafts, args.compile)
    runs = known["runs"]
    return [r for r in runs if (r["arguments"]["drafts"], r["arguments"]["compile"]) != own]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="or stories, smollm2, a path")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has")
    parser.add_argument("--method", choices=("eagle3", "ngram"), default="eagle3")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 24])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.3, 0.7, 1.0])
    parser.add_argument("--steps", type=int, default=16, help="between two synchronisations")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--turn-seconds", type=float, default=0.25, help="fewer steps if longer")
    parser.add_argument("--first", choices=("stock", "nwor"), default="stock")
    parser.add_argument("--compile", choices=("default", "off"), default="default")
    parser.add_argument("--route", default="", help="attention_route of the plugin")
    parser.add_argument("--cache-bytes", type=int, default=0, help="default: what is left")
    parser.add_argument(
        "--profile", action="store_true", help="for ncu.sh: one eager step per engine and rate"
    )
    parser.add_argument("--json", default="", help="write the results there, cell by cell")
    parser.add_argument("--add", action="store_true", help="other runs stay in that file")
    return parser.parse_args(arguments)


# ---- engines ----


def start_both(args: argparse.Namespace, folder: Path) -> list[Side]:
    """stock, nwor. They start in the order asked for."""
    if not args.profile:
        small = {"layers": 8, "cache_bytes": WARM_CACHE_BYTES, "context": [1024]}
        start(argparse.Namespace(**vars(args) | small), folder, nwor=False)
        gc.collect()
        empty_cache()
    share_cache_memory()
    names = ["stock", "nwor"] if args.first == "stock" else ["nwor", "stock"]
    sides = {}
    for name in names:
        started = time.perf_counter()
        llm = start(args, folder, nwor=name == "nwor")
        sides[name] = Side(name, llm, time.perf_counter() - started)
        pretend_prompts_are_cached(sides[name])
    fill_cache(next(iter(sides.values())))
    return [sides["stock"], sides["nwor"]]


def start(args: argparse.Namespace, folder: Path, *, nwor: bool) -> Any:
    from vllm import LLM

    model, options = resolve(args.model, folder)
    if args.layers and args.model == "llama-3.1-8b":
        config = LLAMA_8B | {"num_hidden_layers": args.layers}
        model = str(write_config(folder / f"target-{args.layers}", config))
    speculation: dict[str, Any] = {"method": args.method, "num_speculative_tokens": args.drafts}
    if args.method == "ngram":
        speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    else:
        speculation["model"] = str(eagle_head(folder))
    most = max(args.context) + 1024
    if torch.cuda.is_available():
        speculation["rejection_sample_method"] = "synthetic"
        speculation["synthetic_acceptance_rates"] = [0.5] * args.drafts
        options["attention_backend"] = "CUSTOM" if nwor else "FLASH_ATTN"
        options["gpu_memory_utilization"] = 0.02  # the cache's size is given
        total = torch.cuda.get_device_properties(0).total_memory
        options["kv_cache_memory_bytes"] = args.cache_bytes or total - RESERVED_BYTES
        if not args.profile and args.compile == "off":
            # Rows of the target and of the drafter, which has one per request.
            rows = sorted({b * n for b in args.batch for n in (1, 1 + args.drafts)})
            options["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": rows,
            }
    else:
        options |= {"dtype": "float32", "kv_cache_memory_bytes": args.cache_bytes or 64 << 20}
        most = min(most, 512)
    return LLM(
        model=model,
        max_model_len=most,
        max_num_seqs=max(args.batch),
        max_num_batched_tokens=1024,
        block_size=BLOCK,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        enforce_eager=args.profile or not torch.cuda.is_available(),
        speculative_config=speculation,
        additional_config={"nwor_specpv": {"enable_nwor": nwor, "attention_route": args.route}},
        **options,
    )


def share_cache_memory() -> None:
    """The second engine gets the first one's cache tensors, where the shapes are the same."""
    import vllm.v1.worker.gpu.attn_utils as allocation

    kept: dict[Any, Any] = {}
    # From vLLM 0.32 on it gives views in a layout, before that plain memory.
    views = not hasattr(allocation, "_allocate_kv_cache")
    name = "allocate_kv_cache" if views else "_allocate_kv_cache"
    allocate = getattr(allocation, name)

    def shared(config: Any, *rest: Any) -> Any:
        key = (config.num_blocks, tuple(sorted(t.size for t in config.kv_cache_tensors)))
        key += tuple(map(str, rest)) if views else ()
        if key not in kept:
            kept[key] = allocate(config, *rest)
        return kept[key]

    setattr(allocation, name, shared)


def pretend_prompts_are_cached(side: Side) -> None:
    """All but the last block of a new prompt counts as found in the prefix cache."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

    manager = side.scheduler.kv_cache_manager

    def found(request: Any) -> tuple[Any, int, int]:
        count = (request.num_prompt_tokens - 1) // BLOCK
        free = manager.block_pool.free_block_queue.get_all_free_blocks()
        groups = len(manager.kv_cache_config.kv_cache_groups)
        blocks = tuple(free[i * count : (i + 1) * count] for i in range(groups))
        return KVCacheBlocks(blocks), count * BLOCK, 0

    manager.get_computed_blocks = found


def fill_cache(side: Side) -> None:
    """Noise instead of zeros: a kernel's power draw depends on the bits it moves."""
    layers = side.engine.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        if getattr(layer, "kv_cache", None) is not None and layer.kv_cache.is_cuda:
            layer.kv_cache.normal_()


# ---- cells ----


def measure(
    args: argparse.Namespace, sides: list[Side], batch: int, context: int
) -> list[dict[str, Any]]:
    """The cells of one batch and context, one per acceptance rate."""
    context = min(context, most_context(args, sides[0], batch))
    for side in sides:
        add_requests(side, batch, context)
    cells = []
    for rate in args.acceptance:
        estimate = 0.0
        for side in sides:
            set_acceptance(side, rate)
            side.step_ms = []
            estimate = max(estimate, run(side, WARM_STEPS))
        steps = max(6, min(args.steps, int(1e3 * args.turn_seconds / max(estimate, 1e-3))))
        for turn in range(args.turns):
            for side in sides if turn % 2 else sides[::-1]:
                side.step_ms.append(run(side, steps))
        cells.append(summarise(sides, batch, context, rate))
    for side in sides:
        drop_requests(side)
    return cells


def most_context(args: argparse.Namespace, side: Side, batch: int) -> int:
    """What the cache, and the model's length, allow each request of a batch."""
    blocks = side.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    by_cache = (blocks // batch - 48) * BLOCK
    by_model = side.engine.vllm_config.model_config.max_model_len
    room = 2 * args.turns * args.steps * (1 + args.drafts) * len(args.acceptance)
    return max(2 * BLOCK, min(by_cache // 1024 * 1024 or by_cache, by_model - min(room, 1024)))


def add_requests(side: Side, batch: int, context: int) -> None:
    """Requests that never end by themselves, run until all of them decode."""
    from vllm import SamplingParams

    rng = random.Random(context)
    vocabulary = side.engine.vllm_config.model_config.get_vocab_size()
    params = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
    for index in range(batch):
        words = [rng.randrange(3, vocabulary) for _ in range(BLOCK)]
        prompt = {"prompt_token_ids": words * (context // BLOCK)}
        side.engine.add_request(f"{side.name}-{context}-{index}", prompt, params)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in side.engine.step()}


def drop_requests(side: Side) -> None:
    names = list(side.engine.output_processor.request_states)
    side.engine.abort_request(names, internal=True)
    while side.engine.has_unfinished_requests():
        side.engine.step()


def set_acceptance(side: Side, rate: float) -> None:
    """Changes the synthetic sampler's rates in place, where there is one (not on the CPU)."""

    def change(worker: Any) -> None:
        runner = getattr(worker, "model_runner", None) or worker.worker.model_runner
        rates = getattr(runner.rejection_sampler, "synthetic_conditional_rates", None)
        if rates is not None:
            rates.fill_(rate)

    side.llm.collective_rpc(change)


def run(side: Side, steps: int) -> float:
    """Milliseconds per step."""
    synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        side.engine.step()
    synchronize()
    return 1e3 * (time.perf_counter() - started) / steps


def empty_cache() -> None:

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summarise(sides: list[Side], batch: int, context: int, rate: float) -> dict[str, Any]:
    stock, nwor = sides
    middle = {side.name: statistics.median(side.step_ms) for side in sides}
    cell = {
        "batch": batch,
        "context": context,
        "acceptance": rate,
        "stock_ms": [round(ms, 4) for ms in stock.step_ms],
        "nwor_ms": [round(ms, 4) for ms in nwor.step_ms],
        "ratio": middle["nwor"] / middle["stock"],
    }

    def told(values: list[float]) -> str:
        spread = (max(values) - min(values)) / 2
        return f"{statistics.median(values):8.3f} [{spread:.3f}]".ljust(20)

    print(f"{batch} x {context}".ljust(13), f"{rate:10.1f}  ", told(stock.step_ms),
          told(nwor.step_ms), f"{cell['ratio']:8.4f}", flush=True)  # fmt: skip
    return cell


def staging_stats(sides: list[Side]) -> dict[str, Any]:
    from nwor_specpv.vllm.registry import find_engine

    engine = find_engine(sides[1].engine.vllm_config)
    assert engine is not None
    assert engine.interceptor is not None, "the plugin was not at work"
    stats = engine.interceptor.stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    return stats | {"replays": engine.num_replays}


def bytes_per_token(side: Side) -> int:
    """K and V of one token in the target's layers."""
    from nwor_specpv.vllm.registry import find_engine

    engine = find_engine(side.engine.vllm_config)
    assert engine is not None
    caches = [engine.layers[name].kv_cache for name in engine.own_layers]
    return sum(cache[0].nbytes // BLOCK for cache in caches)


# ---- under a profiler ----


def profile(args: argparse.Namespace, sides: list[Side]) -> None:
    """One step per engine and rate between cudaProfilerStart and Stop, each after a marker.

    The marker is a kernel that models do not use, so that a list of kernels can be cut there; what
    each piece is goes to stdout, for ncu_table.py.
    """

    told = {"device": torch.cuda.get_device_name(), "revision": _stamp.read_stamp().revision}
    print("told", json.dumps(told))
    runtime = torch.cuda.cudart()
    marker = torch.zeros(1, device="cuda")
    for context in args.context:
        for batch in args.batch:
            for side in sides:
                add_requests(side, batch, context)
            for rate in args.acceptance:
                for side in sides:
                    set_acceptance(side, rate)
                    run(side, 4)
                    before = staging_stats(sides)["cache_bytes_written"]
                    runtime.cudaProfilerStart()
                    marker.erfinv_()
                    run(side, 1)
                    runtime.cudaProfilerStop()
                    counted = staging_stats(sides)["cache_bytes_written"] - before
                    if side.name == "stock":  # every row goes there
                        counted = batch * (1 + args.drafts) * bytes_per_token(sides[1])
                    piece = {"side": side.name, "batch": batch, "context": context}
                    piece |= {"acceptance": rate, "drafts": args.drafts, "layers": args.layers}
                    print("piece", json.dumps(piece | {"cache_bytes": counted}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
