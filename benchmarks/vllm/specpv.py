#!/usr/bin/env python3
"""Long contexts in vLLM against stock vLLM, at a real model's shapes.

    python benchmarks/vllm/specpv.py --sides stock refresh lossless --cells 8x32768 6x122880

Dummy weights of Llama-3.1-8B's shapes, an EAGLE3 head, acceptance set by hand: of the head's four
drafts two are right, in vLLM's steps and in partial passes alike, and a draft of a long proposal is
confirmed with `--agreement`. The head has an output matrix of its own for 32000 tokens, as trained
ones have; vLLM gives heads of dummy weights the target's. Prompts are not computed: K/V of the
cache is random, and the model is left out of prefill steps, so that a cell takes seconds instead of
minutes. Each side is a process of its own, as two caches of this size do not fit one GPU;
`--repeats` runs them again in turns. A step's time is that of many steps divided by their number,
after steps that are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_state import counts, origin, worker_runner
from offline import LLAMA_8B, eagle_head, write_config

DRAFTS = 4  # of the head
RIGHT = 2  # of them, every time
LONG_DRAFTS = 15  # drafts by passes: four passes, the head's right guesses, and one more
PREFILL_ROWS = 1024  # steps with more rows are prefill
WARM_STEPS = 10
SIDES = {
    "stock": {"enable_nwor": False},
    "refresh": {
        "enable_specpv": True,
        "specpv_mode": "refresh",
        "specpv_selection": "shared",
        "specpv_n_spec_tokens_buf": 64,
        "specpv_full_refresh_interval": 16,
    },
    "lossless": {
        "enable_specpv": True,
        "specpv_selection": "shared",
        "specpv_draft_lookup": DRAFTS,
    },
}
SCHEDULER = "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler"


def main() -> int:
    args = parse()
    if args.child:
        return run_side(args)
    with contextlib.ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        return run_sides(args, folder)


def run_sides(args: argparse.Namespace, folder: Path) -> int:
    """Those of which the folder has no file, each in a process."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    for number in range(args.repeats):
        for side in args.sides:
            out, part = folder / f"{side}_{number}.json", folder / "part.json"
            if not out.exists():
                command = [sys.executable, __file__, "--child", side, "--json", str(part)]
                command += ["--cells", *args.cells, "--steps", str(args.steps)]
                command += ["--layers", str(args.layers), "--passes", str(args.passes)]
                command += ["--agreement", str(args.agreement), "--memory", str(args.memory)]
                command += ["--set", json.dumps(args.set)]
                if subprocess.run(command, check=False, timeout=args.timeout).returncode == 0:
                    part.replace(out)
            if out.exists():
                found[side].append(json.loads(out.read_text()))
            report(args, found)
    return 0 if all(len(runs) == args.repeats for runs in found.values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=sorted(SIDES), default=["stock", "refresh"])
    parser.add_argument("--cells", nargs="+", default=["8x32768", "6x122880"])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--agreement", type=float, default=0.95)
    parser.add_argument("--passes", type=int, default=0, help="of a proposal; 0: as many as pay")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--set", type=json.loads, default={}, help="JSON: keys of our sides")
    parser.add_argument("--lock", default="", help="a file: sides started at once take turns")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", default="")
    parser.add_argument("--keep", default="", help="a folder: what has run is not run again")
    parser.add_argument("--child", choices=sorted(SIDES), default="")
    return parser.parse_args()


def report(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    cells = {}
    for cell in args.cells:
        entry: dict[str, Any] = {}
        for side, runs in found.items():
            entry[side] = [run["cells"][cell] for run in runs if cell in run["cells"]]
        medians = {
            side: statistics.median(run["step_ms"] for run in runs)
            for side, runs in entry.items()
            if runs
        }
        entry["step_ms"] = medians
        if "stock" in medians:
            entry["ratio"] = {s: ms / medians["stock"] for s, ms in medians.items() if s != "stock"}
            rates = {
                side: statistics.median(run["tokens_per_s"] for run in entry[side])
                for side in medians
            }
            entry["speed"] = {s: r / rates["stock"] for s, r in rates.items() if s != "stock"}
        print(cell, {s: round(ms, 3) for s, ms in medians.items()}, entry.get("ratio"),
              entry.get("speed"), flush=True)  # fmt: skip
        cells[cell] = entry
    if args.json:
        first = next((run for runs in found.values() for run in runs), {})
        counts = {side: runs[-1]["counts"] for side, runs in found.items() if runs}
        settings = {side: settings_of(side, args) for side in found}
        told = {name: first.get(name, "") for name in ("device", "commit", "torch", "vllm")}
        told |= {"drafts": DRAFTS, "acceptance_length": 3.0, "steps": args.steps}
        told |= {"layers": args.layers, "settings": settings, "cells": cells, "counts": counts}
        told |= {"long_drafts": LONG_DRAFTS, "agreement": args.agreement, "passes": args.passes}
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n")


def settings_of(side: str, args: argparse.Namespace) -> dict[str, Any]:
    return dict(SIDES[side]) if side == "stock" else SIDES[side] | args.set


def run_side(args: argparse.Namespace) -> int:
    import torch

    cells = [tuple(map(int, cell.split("x"))) for cell in args.cells]
    with tempfile.TemporaryDirectory() as folder:
        if args.child == "lossless":
            set_guesses()
        llm = start(args.child, cells, Path(folder), args)
        fill_caches(llm)
        leave_prefill_out(llm)
        if args.child == "lossless":
            set_acceptance(llm, args.agreement)
        clock = VerifyClock(llm)
        result: dict[str, Any] = {"cells": {}, "device": torch.cuda.get_device_name()} | origin()
        for batch, context in cells:
            with taking_turns(args.lock):
                cell = measure(llm, clock, batch, context, args.steps)
            print(f"  {args.child} {batch} x {context}: {cell['step_ms']:.3f} ms, verify "
                  f"{cell['verify_ms']:.3f}", flush=True)  # fmt: skip
            result["cells"][f"{batch}x{context}"] = cell
            result["counts"] = counts()
            Path(args.json).write_text(json.dumps(result))
    return 0


def start(side: str, cells: list[tuple[int, int]], folder: Path, args: argparse.Namespace) -> Any:
    from vllm import LLM
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True
    layers, lengths = args.layers, [DRAFTS]
    batches = sorted({batch for batch, _ in cells})
    room = max(1024, most_tokens(args.steps))
    longest = max(context for _, context in cells) + room
    model = LLAMA_8B | {"num_hidden_layers": layers, "max_position_embeddings": longest}
    settings = settings_of(side, args)
    if settings.get("enable_specpv"):
        settings["specpv_max_requests"] = max(batches)
    options: dict[str, Any] = {}
    if side == "lossless":
        settings["specpv_draft_passes"] = args.passes
        options["scheduler_cls"] = SCHEDULER
        lengths = [DRAFTS, LONG_DRAFTS]
    rates = [1.0] * RIGHT + [0.0] * (max(lengths) - RIGHT)
    return LLM(
        model=str(write_config(folder / "target", model)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=max(batches),
        max_num_batched_tokens=16384,
        long_prefill_token_threshold=512,  # all requests end their prompts in the same step
        enable_prefix_caching=False,
        gpu_memory_utilization=args.memory,
        attention_backend="FLASH_ATTN" if side == "stock" else "CUSTOM",
        kv_cache_memory_bytes=max(b * (c + room) for b, c in cells) * layers * 4096 + (4 << 30),
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [b * (1 + n) for b in batches for n in lengths],
        },
        speculative_config={
            "method": "eagle3",
            "model": str(eagle_head(folder)),
            "num_speculative_tokens": max(lengths),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
        },
        additional_config={"nwor_specpv": settings},
        **options,
    )


def set_guesses() -> None:
    """Partial passes find the same number of the head's guesses right every time."""
    import torch

    from nwor_specpv.vllm.specpv import chain

    def synthetic(said: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.full_like(said[:, 0], RIGHT, dtype=torch.int32)

    chain.matching_guesses = synthetic


def set_acceptance(llm: Any, agreement: float) -> None:
    """What full steps accept: the head's right guesses, or drafts by passes one by one."""
    import torch

    runner = worker_runner(llm)
    speculator, rates = runner.speculator, runner.rejection_sampler.synthetic_conditional_rates
    by_head, by_passes = torch.zeros_like(rates), torch.zeros_like(rates)
    by_head[:RIGHT] = 1
    propose = speculator.propose

    def followed(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        made = speculator.latest_passes * (1 + RIGHT)
        by_passes.zero_()
        by_passes[:made] = agreement
        by_passes[made : made + RIGHT] = 1  # the head's guesses behind the chain
        rates.copy_(by_passes if made else by_head)
        return drafts

    speculator.propose = followed


@contextlib.contextmanager
def taking_turns(path: str) -> Iterator[None]:
    """One measurement at a time, where two engines fit the GPU and were started side by side."""
    if not path:
        yield
        return
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fill_caches(llm: Any) -> None:
    """Random K/V, layer by layer, in pieces."""
    runner = worker_runner(llm)
    for layer in runner.vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        if cache is not None and cache.numel():
            for piece in cache.flatten(0, 0).split(4096):
                piece.normal_()


def leave_prefill_out(llm: Any) -> None:
    """Steps of many rows give zeros at once; what decode steps run is untouched."""
    import torch

    model = worker_runner(llm).model
    forward = model.forward

    def shortened(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None or tokens.shape[0] < PREFILL_ROWS:
            return forward(*args, **kwargs)
        hidden = torch.zeros(
            tokens.shape[0], LLAMA_8B["hidden_size"], dtype=torch.bfloat16, device=tokens.device
        )
        return hidden, [hidden] * 3  # EAGLE3 wants those of three layers

    model.forward = shortened


class VerifyClock:
    """GPU time of the target's own graph in each step, without the drafter's."""

    def __init__(self, llm: Any) -> None:
        manager = worker_runner(llm).cudagraph_manager
        replay = manager.run_fullgraph
        self._events: list[tuple[Any, Any]] = []

        def timed(*args: Any) -> Any:
            import torch

            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = replay(*args)
            end.record()
            self._events.append((start, end))
            return result

        manager.run_fullgraph = timed

    def reset(self) -> None:
        self._events.clear()

    def mean_ms(self) -> float:
        spans = [start.elapsed_time(end) for start, end in self._events]
        return sum(spans) / max(1, len(spans))


def most_tokens(steps: int) -> int:
    """More than a request can get, so that none ends in a cell of so many steps."""
    return (1 + WARM_STEPS + steps) * (1 + LONG_DRAFTS)


def measure(llm: Any, clock: VerifyClock, batch: int, context: int, steps: int) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    engine, rng = llm.llm_engine, random.Random(batch * context)
    params = SamplingParams(temperature=0, max_tokens=most_tokens(steps), ignore_eos=True)
    names = []
    for index in range(batch):
        words = [rng.randrange(3, 30000) for _ in range(64)]
        prompt = (words * (context // 64 + 1))[:context]
        names.append(f"{context}-{index}-{time.monotonic_ns()}")
        engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
    lens: dict[str, int] = {}
    while len(lens) < batch:
        note(engine.step(), lens)
    for _ in range(WARM_STEPS):
        note(engine.step(), lens)
    torch.cuda.synchronize()
    clock.reset()
    before, started = sum(lens.values()), time.perf_counter()
    for _ in range(steps):
        note(engine.step(), lens)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    verify_ms = clock.mean_ms()
    tokens = sum(lens.values()) - before
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    told: dict[str, Any] = {"step_ms": 1e3 * seconds / steps, "tokens_per_s": tokens / seconds}
    speculator = worker_runner(llm).speculator
    if hasattr(speculator, "lengths"):
        told["passes"] = speculator.latest_passes
    return told | {"verify_ms": verify_ms}


def note(outputs: Any, lens: dict[str, int]) -> None:
    for output in outputs:
        lens[output.request_id] = len(output.outputs[0].token_ids)
        if output.finished:
            raise RuntimeError(
                f"{output.request_id} has ended after {lens[output.request_id]} tokens"
            )


if __name__ == "__main__":
    raise SystemExit(main())
