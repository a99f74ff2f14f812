#!/usr/bin/env python3
"""Long contexts in vLLM against stock vLLM, at a real model's shapes.

    python benchmarks/vllm/specpv.py --sides stock lossless --cells 8x32768 6x122880
    python benchmarks/vllm/specpv.py --sides plain self --cells 8x32768 6x122880

* stock: vLLM with an EAGLE3 head. refresh, lossless: the same head and the plugin's modes.
* plain: vLLM without drafts. self: mode lossless without a head.

Dummy weights of Llama-3.1-8B's shapes, acceptance set by hand (see specpv_preset.py): of the head's
four drafts two are right, a pass without a head yields 1.5 tokens, and full steps confirm each
draft of a long proposal with `--agreement`. The head has an output matrix of its own for 32000
tokens, as trained ones have; vLLM gives heads of dummy weights the target's. Prompts are not
computed: K/V of the cache is random, and the model is left out of prefill steps, so that a cell
takes seconds instead of minutes. Each side is a process of its own, as two caches of this size do
not fit one GPU; `--repeats` runs them again in turns.

A step's time is that of many steps divided by their number. Where the closed loop chooses how steps
are made, the same cell has run `--settle` times before. `passes` is a mean.
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
from model_shapes import LLAMA_8B, eagle_head, write_config
from specpv_preset import DRAFTS, HEAD, LOOKUPS, RIGHT, preset

PREFILL_ROWS = 1024  # steps with more rows are prefill
WARM_STEPS = 10
SIDES = {
    "stock": {"enable_nwor": False},
    "plain": {"enable_nwor": False},
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
    "self": {"enable_specpv": True, "specpv_draft_lookup": DRAFTS},
}
STOCK = ("stock", "plain")  # without the plugin
# What a side is compared with, if that was measured.
BASES = {"refresh": "stock", "lossless": "stock", "self": "plain"}
# Sides that draft by passes: who guesses, drafts of a step at most, and how often they agree.
GUESSES = {"lossless": HEAD, "self": LOOKUPS}
LONG_DRAFTS = {HEAD: 15, LOOKUPS: 16}
AGREEMENT = {HEAD: 0.95, LOOKUPS: 0.9}
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
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    for number in range(args.repeats):
        for side in args.sides:
            out, part = folder / f"{side}_{number}.json", folder / "part.json"
            if not out.exists():
                command = [sys.executable, __file__, "--child", side, "--json", str(part)]
                command += ["--cells", *args.cells, "--steps", str(args.steps)]
                command += ["--settle", str(args.settle), "--compile", args.compile]
                command += ["--layers", str(args.layers), "--passes", str(args.passes)]
                command += ["--agreement", str(args.agreement), "--memory", str(args.memory)]
                command += ["--set", json.dumps(args.set), "--lock", args.lock]
                if subprocess.run(command, check=False, timeout=args.timeout).returncode == 0:
                    part.replace(out)
            if out.exists():
                found[side].append(json.loads(out.read_text()))
            report(args, found)
    return 0 if all(len(runs) == args.repeats for runs in found.values()) else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", nargs="+", choices=sorted(SIDES), default=["stock", "lossless"])
    parser.add_argument("--cells", nargs="+", default=["8x32768", "6x122880"])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--settle", type=int, default=1, help="runs of a cell before, in a loop")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--agreement", type=float, default=0,
                        help="0: 0.95 with a head, 0.9 without")  # fmt: skip
    parser.add_argument("--passes", type=int, default=0, help="of a proposal; 0: as many as pay")
    parser.add_argument("--compile", choices=("default", "off"), default="off")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--set", type=json.loads, default={}, help="JSON: keys of our sides")
    parser.add_argument("--lock", default="", help="a file: sides started at once take turns")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a process")
    parser.add_argument("--json", default="")
    parser.add_argument("--keep", default="", help="a folder: what has run is not run again")
    parser.add_argument("--child", choices=sorted(SIDES), default="")
    return parser.parse_args(arguments)


def report(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    cells = {cell: compare(cell, found) for cell in args.cells}
    for name, cell in cells.items():
        for side, ms in cell["step_ms"].items():
            told = f"{name} {side}: {ms:.3f} ms, {middle(cell[side], 'tokens_per_s'):.0f} tokens/s"
            if side in cell["speed"]:
                told += f", {cell['speed'][side]:.3f} times {BASES[side]}"
            if "passes" in cell[side][-1]:
                told += f", {middle(cell[side], 'passes'):.2f} passes, {cell[side][-1]['arms']}"
            print(told, flush=True)
    if args.json:
        first = next((run for runs in found.values() for run in runs), {})
        told = {name: first.get(name, "") for name in ("device", "commit", "torch", "vllm")}
        told |= {"drafts": DRAFTS, "acceptance_length": 1.0 + RIGHT, "steps": args.steps}
        told |= {"layers": args.layers, "passes": args.passes, "compile": args.compile}
        told["agreement"] = {side: agreement(side, args) for side in found if side in GUESSES}
        told["settings"] = {side: settings_of(side, args) for side in found}
        told["cells"] = cells
        told["counts"] = {side: runs[-1]["counts"] for side, runs in found.items() if runs}
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n")


def compare(cell: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What was measured of a cell, with medians over processes and ratios to each side's base."""
    told: dict[str, Any] = {
        side: [run["cells"][cell] for run in runs if cell in run["cells"]]
        for side, runs in found.items()
    }
    ms = {side: middle(runs, "step_ms") for side, runs in told.items() if runs}
    rates = {side: middle(told[side], "tokens_per_s") for side in ms}
    paired = [side for side in ms if BASES.get(side) in ms]
    told["step_ms"] = ms
    told["ratio"] = {side: ms[side] / ms[BASES[side]] for side in paired}
    told["speed"] = {side: rates[side] / rates[BASES[side]] for side in paired}
    return told


def middle(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def settings_of(side: str, args: argparse.Namespace) -> dict[str, Any]:
    return dict(SIDES[side]) if side in STOCK else SIDES[side] | args.set


def agreement(side: str, args: argparse.Namespace) -> float:
    return args.agreement or AGREEMENT[GUESSES[side]]


def run_side(args: argparse.Namespace) -> int:
    import torch

    if args.child in STOCK:
        os.environ["VLLM_PLUGINS"] = "none"
    cells = [tuple(map(int, cell.split("x"))) for cell in args.cells]
    guesses = GUESSES.get(args.child)
    acceptance = preset(guesses, agreement(args.child, args)) if guesses else None
    with tempfile.TemporaryDirectory() as folder:
        if acceptance is not None:
            acceptance.install()
        llm = start(args.child, cells, Path(folder), args)
        fill_caches(llm)
        leave_prefill_out(llm)
        if acceptance is not None:
            acceptance.follow(llm)
        bench, settle = Bench(llm, args.steps), 0
        if guesses and not args.passes:
            settle = args.settle
        result: dict[str, Any] = {"cells": {}, "device": torch.cuda.get_device_name()} | origin()
        for batch, context in cells:
            with taking_turns(args.lock):
                cell = bench.measure(batch, context, settle)
            print(f"  {args.child} {batch} x {context}: {cell['step_ms']:.3f} ms, verify "
                  f"{cell['verify_ms']:.3f}, {cell['tokens_per_s']:.0f} tokens/s in "
                  f"{cell['wall_s']:.0f} s, {cell.get('arms', '')}", flush=True)  # fmt: skip
            result["cells"][f"{batch}x{context}"] = cell
            result["counts"] = counts()
            Path(args.json).write_text(json.dumps(result))
    return 0


def start(side: str, cells: list[tuple[int, int]], folder: Path, args: argparse.Namespace) -> Any:
    from vllm import LLM
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True
    layers, room = args.layers, most_tokens(args.steps)
    batches = sorted({batch for batch, _ in cells})
    longest = max(context for _, context in cells) + room
    model = LLAMA_8B | {"num_hidden_layers": layers, "max_position_embeddings": longest}
    settings = settings_of(side, args)
    if settings.get("enable_specpv"):
        settings["specpv_max_requests"] = max(batches)
    options: dict[str, Any] = {}
    if side in GUESSES:
        settings["specpv_draft_passes"] = args.passes
        options["scheduler_cls"] = SCHEDULER
    drafting = speculation(side, folder)
    if drafting is not None:
        options["speculative_config"] = drafting
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": capture_sizes(side, batches)}
    if args.compile == "off":
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
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
        attention_backend="FLASH_ATTN" if side in STOCK else "CUSTOM",
        kv_cache_memory_bytes=max(b * (c + room) for b, c in cells) * layers * 4096 + (4 << 30),
        compilation_config=graphs,
        additional_config={"nwor_specpv": settings},
        **options,
    )


def speculation(side: str, folder: Path) -> dict[str, Any] | None:
    """vLLM's speculative config, with acceptance that is set while serving where passes draft."""
    if side == "plain":
        return None
    drafts = most_drafts(side)
    told: dict[str, Any] = {"method": "eagle3", "model": str(eagle_head(folder))}
    if GUESSES.get(side) == LOOKUPS:
        told = {"method": "ngram_gpu"}
    rates = [1.0] * RIGHT + [0.0] * (drafts - RIGHT)
    return told | {
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


def most_drafts(side: str) -> int:
    """Of a step."""
    if side == "plain":
        return 0
    return LONG_DRAFTS[GUESSES[side]] if side in GUESSES else DRAFTS


def capture_sizes(side: str, batches: list[int]) -> list[int]:
    """Rows of CUDA graphs: every batch with every number of drafts that a step may have, and single
    rows, which plain steps and heads have."""
    from nwor_specpv.arms import draft_lengths

    most = most_drafts(side)
    lengths = draft_lengths(most, DRAFTS) if side in GUESSES else (0, most)
    return sorted({batch * (1 + drafts) for batch in batches for drafts in lengths})


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

    runner = worker_runner(llm)
    model, told = runner.model, runner.use_aux_hidden_state_outputs
    forward = model.forward

    def shortened(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None or tokens.shape[0] < PREFILL_ROWS:
            return forward(*args, **kwargs)
        hidden = torch.zeros(
            tokens.shape[0], LLAMA_8B["hidden_size"], dtype=torch.bfloat16, device=tokens.device
        )
        return (hidden, [hidden] * 3) if told else hidden  # EAGLE3 wants those of three layers

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

    @property
    def replays(self) -> int:
        return len(self._events)

    def mean_ms(self) -> float:
        spans = [start.elapsed_time(end) for start, end in self._events]
        return sum(spans) / max(1, len(spans))


def most_tokens(steps: int) -> int:
    """More than a request can get, so that none ends in a cell of so many steps."""
    return max(1024, (1 + WARM_STEPS + steps) * (1 + max(LONG_DRAFTS.values())))


class Bench:
    """Measures cells on one engine. Thread-safety: none."""

    def __init__(self, llm: Any, steps: int) -> None:
        from real_measure import Arms

        self._engine, self._steps = llm.llm_engine, steps
        self._core = llm.llm_engine.engine_core.engine_core
        self._clock, self._arms = VerifyClock(llm), Arms(llm)
        self._lens: dict[str, int] = {}  # tokens of each request so far

    def measure(self, batch: int, context: int, settle: int) -> dict[str, Any]:
        """The last of `settle` + 1 runs."""
        began = time.perf_counter()
        for _ in range(settle):
            self._run(batch, context)
        told = self._run(batch, context)
        return told | {"wall_s": time.perf_counter() - began}

    def _run(self, batch: int, context: int) -> dict[str, Any]:
        import torch

        self._begin(batch, context)
        for _ in range(WARM_STEPS):
            self._step()
        torch.cuda.synchronize()
        self._clock.reset()
        before, passes, taken = sum(self._lens.values()), passes_made(), self._arms.taken.copy()
        known, started = len(self._arms.measured), time.perf_counter()
        for _ in range(self._steps):
            self._step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        told: dict[str, Any] = {
            "step_ms": 1e3 * seconds / self._steps,
            "tokens_per_s": (sum(self._lens.values()) - before) / seconds,
            "verify_ms": self._clock.mean_ms(),
            "replays": self._clock.replays / self._steps,
        }
        if self._arms.taken:
            from real_summary import arm_means

            told["passes"] = (passes_made() - passes) / self._steps
            told["arms"] = dict(self._arms.taken - taken)
            told["arm_means"] = arm_means(self._arms.measured[known:])
        self._end()
        return told

    def _begin(self, batch: int, context: int) -> None:
        """Requests whose prompts are there."""
        from vllm import SamplingParams

        rng = random.Random(batch * context)
        most = most_tokens(self._steps)
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        for index in range(batch):
            words = [rng.randrange(3, 30000) for _ in range(64)]
            prompt = (words * (context // 64 + 1))[:context]
            name = f"{context}-{index}-{time.monotonic_ns()}"
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while len(self._lens) < batch:
            self._step()

    def _step(self) -> None:
        for output in self._engine.step():
            tokens = self._lens[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                raise RuntimeError(f"{output.request_id} has ended after {tokens} tokens")

    def _end(self) -> None:
        self._engine.abort_request(list(self._lens))
        while self._engine.has_unfinished_requests() or self._core.batch_queue:
            self._engine.step()
        self._lens.clear()


def passes_made() -> int:
    from nwor_specpv import Metrics

    return Metrics().snapshot()["specpv_draft_passes_total"]


if __name__ == "__main__":
    raise SystemExit(main())
