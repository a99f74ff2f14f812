#!/usr/bin/env python3
"""Draft trees in vLLM beside stock vLLM's chains of the same head.

    python benchmarks/vllm/trees.py --out DIR                            # all parts, in this order
    python benchmarks/vllm/trees.py --out DIR --parts text --batch 1 4 --seconds 540
    python benchmarks/vllm/trees.py --out DIR --summary benchmarks/results/h200/vllm_trees.json

* verify: what a step of 1 to 64 rows for each request takes in stock vLLM, at an 8B model's shapes
  with dummy weights: GPU time of the target's graph, without the head's.
* text: tokens per second of SmolLM2 with the shipped head on held-out prompts, greedily. It also
  records how often a step accepts how many drafts.
* shapes: tokens per second at the 8B shapes. Steps accept as many drafts, at random, as those of
  `text` with the same rows and 1 request did: weights and drafts mean nothing.

Sides are `plain`, stock chains of 1 to 7 drafts, trees of so many rows, and `trees`, whose rows are
chosen while serving. Each is a process of its own with model runner V2; sides take turns, and
--together says how many engines are up at once. The clock runs while the whole batch decodes. Every
measurement is a line of DIR/records.jsonl, and a later call goes on where one was stopped; with
--seconds it stops in time, with status 75. Where rows are chosen, it has what was chosen and what
steps of each kind took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from real_engine import environment
from real_measure import Arms
from real_records import FAILED, MEASURED, Cell, Job, Records
from real_summary import arm_means
from turns import UNFINISHED, Gate, Turns, end, launch, wait

PARTS = ("verify", "text", "shapes")
CHAINS = tuple(f"chain{number}" for number in range(1, 8))
TREES = tuple(f"trees{rows}" for rows in (4, 8, 16, 32, 64))
SIDES = {
    "verify": tuple(f"rows{rows}" for rows in (1, 5, 8, 16, 32, 64)),
    "text": ("plain", *CHAINS, *TREES, "trees"),
    "shapes": ("plain", *CHAINS, *TREES, "trees"),
}
BATCHES = {"verify": (1, 4, 8, 16), "text": (1, 4, 8, 16, 32), "shapes": (1, 4, 8, 16, 32)}
CONTEXT = 1024  # of prompts at the 8B shapes
WARM_STEPS, SETTLING = 10, 4  # runs that are not counted where rows are chosen


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    records = Records(args.out / "records.jsonl")
    if args.summary:
        return write_summary(records, args.summary)
    if args.child:
        return serve(args, records)
    deadline = time.time() + args.seconds if args.seconds else float("inf")
    for part in args.parts:
        wanted = [side for side in args.sides or SIDES[part] if side in SIDES[part]]
        left = [side for side in wanted if records.pending(jobs(args, part, side))]
        for first in range(0, len(left), args.together):
            some = left[first : first + args.together]
            starts = [records.start_seconds(f"{part} {side}") for side in some]
            if time.time() + max(starts) <= deadline:
                run_sides(arguments, args, records, part, some, deadline)
            if any(records.pending(jobs(args, part, side)) for side in some):  # time is up
                print("measurements are left: run the command again", file=sys.stderr)
                return UNFINISHED
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of records and logs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sides", nargs="+", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[], help="requests at once")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192, help="of a request, at most")
    parser.add_argument("--prompts", type=int, default=72, help="of text, at most")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B shapes")
    parser.add_argument("--seconds", type=float, default=0, help="of this call; 0: no limit")
    parser.add_argument("--together", type=int, default=1, help="engines that are up at once")
    parser.add_argument("--summary", type=Path, help="write the result of DIR there, run nothing")
    parser.add_argument("--child", nargs=3, metavar=("PART", "SIDE", "DEADLINE"),
                        help=argparse.SUPPRESS)  # fmt: skip
    return parser.parse_args(arguments)


def jobs(args: argparse.Namespace, part: str, side: str) -> list[Job]:
    context = 0 if part == "text" else CONTEXT
    batches = args.batch or BATCHES[part]
    return [
        Job(Cell(batch, context, part, 0.0), side, turn)
        for turn in range(args.turns)
        for batch in batches
    ]


def run_sides(
    arguments: list[str],
    args: argparse.Namespace,
    records: Records,
    part: str,
    sides: Sequence[str],
    deadline: float,
) -> None:
    print(f"{part}: {', '.join(sides)}", file=sys.stderr, flush=True)
    gate = Gate(args.out)
    with contextlib.ExitStack() as stack:
        children = {}
        for side in sides:
            stock = "lossless" if side.startswith("trees") else "plain"
            told = environment(stock, os.environ) | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
            command = [sys.executable, sys.argv[0], *arguments]
            command += ["--child", part, side, str(deadline)]
            children[side] = launch(command, told, args.out / f"{part}-{side}.log")
            stack.callback(end, children[side])

        def look() -> None:
            gate.look([f"{part}-{side}" for side in sides if children[side].poll() is None])

        codes = {side: wait(child, deadline, look) for side, child in children.items()}
    for side, code in codes.items():
        if code != UNFINISHED:
            left = records.pending(jobs(args, part, side))
            reason = f"the engine ended with status {code}"
            records.add(*(job.record(FAILED, reason=reason) for job in left))


def serve(args: argparse.Namespace, records: Records) -> int:
    part, side, deadline = args.child[0], args.child[1], float(args.child[2])
    todo = records.pending(jobs(args, part, side))
    began, turns = time.perf_counter(), Turns(args.out, f"{part}-{side}")
    with tempfile.TemporaryDirectory() as folder:
        accepted = accepted_by_rows(records, side) if part == "shapes" else {}
        llm = start(args, part, side, [job.cell.requests for job in todo], accepted, Path(folder))
        records.add(
            {"engine": f"{part} {side}", "ready_s": round(time.perf_counter() - began, 1)}
            | described(args)
        )
        arms = Arms(llm)
        turns.wait()
        for job in todo:
            with turns:
                if time.time() > deadline:
                    return UNFINISHED
                batch, started = job.cell.requests, time.perf_counter()
                if part == "verify":
                    found = verify(llm, batch)
                else:
                    found = speed(args, llm, arms, part, side, batch)
                wall = time.perf_counter() - started
                records.add(job.record(MEASURED, wall_s=round(wall, 2), **found))
    return 0


def described(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from engine_state import origin

    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else platform.machine()
    return {"device": device, "layers": args.layers, "tokens": args.tokens} | origin()


# ---- engines ----


def drafts_of(side: str) -> int:
    """0: none, or chosen while serving."""
    number = int("".join(filter(str.isdigit, side)) or 0)
    return number if side.startswith("chain") else max(0, number - 1)


def start(
    args: argparse.Namespace,
    part: str,
    side: str,
    batches: Sequence[int],
    accepted: dict[str, list[float]],
    folder: Path,
) -> Any:
    import torch
    from vllm import LLM

    drafts, trees = drafts_of(side), side.startswith("trees")
    rows_are_chosen = side == "trees"
    longest = (512 if part == "text" else CONTEXT) + 2 * args.tokens + 64
    model, head, options = model_of(args, part, folder, max(batches) * longest)
    speculation: dict[str, Any] | None = {"method": "eagle3", "model": head}
    if not trees:
        speculation["num_speculative_tokens"] = drafts
    if side in ("plain", "rows1"):
        speculation = None
    elif part != "text" and not trees:
        rates = accepted[side] if part == "shapes" else []
        speculation["rejection_sample_method"] = "synthetic"
        speculation["synthetic_acceptance_rates"] = [*rates, *[0.0] * drafts][:drafts]
    if trees:
        rows: int | str = "auto" if rows_are_chosen else 1 + drafts
        options["additional_config"] = {"nwor_specpv": {"draft_tree": rows, "strict": True}}
    gpu = torch.cuda.is_available()
    if gpu:
        lengths = [drafts] if drafts else [drafts_of(name) for name in TREES if trees]
        options["attention_backend"] = "CUSTOM" if trees else "FLASH_ATTN"
        options["gpu_memory_utilization"] = 0.02  # the size of the cache is given
        most = 512 if rows_are_chosen else 2048  # as without these options
        sizes = sorted({b * (1 + n) for b in batches for n in (0, *lengths) if b * (1 + n) <= most})
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    llm = LLM(
        model=model,
        max_num_seqs=max(batches),
        max_model_len=longest,
        max_num_batched_tokens=8192 if gpu else 1024,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=not gpu,
        speculative_config=speculation,
        seed=0,
        **options,
    )
    if trees and part == "shapes":
        accept_at_random(accepted)
    return llm


def model_of(
    args: argparse.Namespace, part: str, folder: Path, tokens: int
) -> tuple[str, str, dict[str, Any]]:
    """Folders of the model and its head, and vLLM's options for them, with a cache of so many
    tokens."""
    import torch
    from offline import LLAMA_8B, eagle_head, write_config

    gpu = torch.cuda.is_available()
    if part == "text":
        from nwor_specpv.drafters.vllm_head import write_vllm_head
        from nwor_specpv.models import smollm2

        dtype = "bfloat16" if gpu else "float32"
        model = smollm2(dtype)
        cache = {"kv_cache_memory_bytes": (4 << 30) if gpu else (256 << 20)}
        return str(model), str(write_vllm_head(folder / "head", model)), {"dtype": dtype} | cache
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True  # of 32000 tokens, as trained heads have
    config = LLAMA_8B | {"num_hidden_layers": args.layers}
    # Of a layer and token: keys and values of 8 heads of 128 channels; the head is a layer more.
    cache = int(1.1 * tokens) * (args.layers + 1) * (4096 if gpu else 8192) + (64 << 20)
    options = {"load_format": "dummy", "kv_cache_memory_bytes": cache}
    return str(write_config(folder / "target", config)), str(eagle_head(folder)), options


def accept_at_random(accepted: dict[str, list[float]]) -> None:
    """Has steps of trees accept as many drafts as was measured for so many rows: the first rows,
    since drafts of dummy weights mean nothing. The walk over the tree is done as well."""
    import torch

    from nwor_specpv.vllm.tree.store import WholeTrees

    walk, tables = WholeTrees.accept, {}

    def accept(step: Any, tokens: Any, drawn: Any, *, staged: bool) -> Any:
        walk(step, tokens, drawn, staged=staged)
        batch, rows = step.first_child.shape
        if rows not in tables:
            tables[rows] = torch.tensor(accepted[f"trees{rows}"], device=drawn.device)
        chance = torch.rand(batch, 1, device=drawn.device)
        count = (chance < tables[rows]).sum(1)
        steps = step.steps[:rows]
        step.counts = count.to(torch.int32)
        step.path = torch.where(steps < count[:, None], steps + 1, -1).to(torch.int32)
        step.walk = torch.where(steps <= count[:, None], steps, 0)
        return drawn.view(batch, rows).gather(1, step.walk), step.counts + 1

    WholeTrees.accept = accept  # type: ignore[method-assign]


def accepted_by_rows(records: Records, side: str) -> dict[str, list[float]]:
    """How often a step of this side accepts its first, second, .. draft: as in `text` with one
    request. Where rows are chosen, that of all trees."""
    wanted = {"plain": (), "trees": TREES}.get(side, (side,))
    found: dict[str, Counter[int]] = {}
    for record in records.jobs():
        of_text = record["prompt"] == "text" and record["requests"] == 1
        if of_text and record["side"] in wanted and record["status"] == MEASURED:
            known = found.setdefault(record["side"], Counter())
            known.update({int(number): count for number, count in record["emitted"].items()})
    missing = set(wanted) - found.keys()
    if missing:
        raise SystemExit(
            f"part shapes needs part text with 1 request: {', '.join(sorted(missing))}"
        )
    return {
        side: [
            sum(count for number, count in emitted.items() if number > depth) / emitted.total()
            for depth in range(1, max(emitted))
        ]
        for side, emitted in found.items()
    }


# ---- measurements ----


def verify(llm: Any, batch: int) -> dict[str, Any]:
    """A step's time, and on a GPU that of the target's graph in it."""
    import torch
    from specpv import VerifyClock

    gpu = torch.cuda.is_available()
    clock = VerifyClock(llm) if gpu else None
    with running(llm, prompts_of(llm, "verify", batch), CONTEXT) as engine:
        for _ in range(WARM_STEPS):
            engine.step()
        if clock is not None:
            torch.cuda.synchronize()
            clock.reset()
        began = time.perf_counter()
        for _ in range(WARM_STEPS):
            engine.step()
        if clock is not None:
            torch.cuda.synchronize()
        step_ms = 1e3 * (time.perf_counter() - began) / WARM_STEPS
    return {"step_ms": step_ms, "verify_ms": clock.mean_ms() if clock is not None else None}


def speed(
    args: argparse.Namespace, llm: Any, arms: Arms, part: str, side: str, batch: int
) -> dict[str, Any]:
    """Tokens per second while the whole batch decodes, after runs that are not counted."""
    for _ in range(SETTLING if side == "trees" else 1):
        decode(args, llm, part, batch)
    before, measured = arms.taken.copy(), len(arms.measured)
    tokens, seconds, emitted = decode(args, llm, part, batch)
    steps, taken = emitted.total(), dict(arms.taken - before)
    chosen = {"arms": taken, "arm_means": arm_means(arms.measured[measured:])} if taken else {}
    return chosen | {
        "tokens_per_s": tokens / seconds,
        "step_ms": 1e3 * seconds * batch / steps,
        "tokens_per_step": tokens / steps,
        "emitted": dict(sorted(emitted.items())),  # tokens of a step and request: how often
    }


def decode(
    args: argparse.Namespace, llm: Any, part: str, batch: int
) -> tuple[int, float, Counter[int]]:
    prompts, emitted, seconds = prompts_of(llm, part, batch)[: args.prompts], Counter(), 0.0
    rounds = -(-len(prompts) // batch)
    for number in range(rounds):
        some = [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]
        with running(llm, some, args.tokens) as engine:
            lens: dict[str, int] = {}
            while len(lens) < batch:
                note(engine.step(), lens, Counter())
            began, over = time.perf_counter(), False
            while not over:
                over = note(engine.step(), lens, emitted)
            seconds += time.perf_counter() - began
    return sum(number * count for number, count in emitted.items()), seconds, emitted


def note(outputs: Any, lens: dict[str, int], emitted: Counter[int]) -> bool:
    """Counts what requests got; whether one has ended."""
    for output in outputs:
        length = len(output.outputs[0].token_ids)
        before = lens.get(output.request_id)
        if before is not None and length > before:
            emitted[length - before] += 1
        lens[output.request_id] = length
    return any(output.finished for output in outputs)


@contextlib.contextmanager
def running(llm: Any, prompts: Sequence[list[int]], tokens: int) -> Iterator[Any]:
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    names = [f"{time.monotonic_ns()}-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    yield engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    while engine.has_unfinished_requests():
        engine.step()


def prompts_of(llm: Any, part: str, batch: int) -> list[list[int]]:
    """Held-out prompts of the head's training, as many as there are; noise at the 8B shapes."""
    if part != "text":
        rng = random.Random(batch)
        return [[rng.randrange(3, 30000) for _ in range(CONTEXT)] for _ in range(batch)]
    from nwor_specpv.train.prompt_file import prompt_encoder
    from nwor_specpv.train.prompts import held_out

    folder = Path(llm.llm_engine.vllm_config.model_config.model)
    return [opening.tokens for opening in held_out(prompt_encoder(folder))]


# ---- the result ----


def write_summary(records: Records, path: Path) -> int:
    """Medians over turns, by part, side and requests."""
    engines, cells = records.engines(), {}
    for record in records.jobs():
        if record["status"] == MEASURED:
            place = cells.setdefault(record["prompt"], {}).setdefault(record["side"], {})
            place.setdefault(str(record["requests"]), []).append(record)
    keys = ("tokens_per_s", "tokens_per_step", "step_ms", "verify_ms")
    parts = {
        part: {
            side: {batch: _medians(found, keys) for batch, found in by_batch.items()}
            for side, by_batch in sides.items()
        }
        for part, sides in cells.items()
    }
    names = ("device", "commit", "torch", "vllm", "layers", "tokens")
    origin = {name: engines[-1][name] for name in names} if engines else {}
    failed = [Job.of(r).key for r in records.jobs() if r["status"] == FAILED]
    path.write_text(json.dumps(origin | {"parts": parts, "failed": failed}, indent=1) + "\n")
    return 0


def _medians(found: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    told = {
        key: statistics.median(record[key] for record in found)
        for key in keys
        if found[0].get(key) is not None
    }
    return told | {"turns": len(found)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
