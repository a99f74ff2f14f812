#!/usr/bin/env python3
"""Long contexts in vLLM with real weights and real text, against vLLM's own ways to decode.

    python benchmarks/vllm/real.py --model FOLDER --out DIR                       # all cells, hours
    python benchmarks/vllm/real.py --model smollm2 --head shipped --out DIR --cells 24x8192 \\
        --prompts question --temperatures 0 0.6 --seconds 540
    python benchmarks/vllm/real.py --model FOLDER --out DIR --summary real_MODEL.json

Each side (see real_engine.py) is a process of its own and serves all cells; sides take turns, and
each is started at most twice. With --together all are up at once, each with its share of the GPU's
memory, and take turns of a tenth of a second within the cells (turns.py). A cell is a number of
requests, a context (prompt and answer), a kind of prompt (see real_prompts.py) and a temperature;
real_measure.py says what is timed. Every measurement is a line of DIR/records.jsonl, and a later
call goes on where one was stopped. With --seconds a call ends in time, with status 75 while
something is left. The output of an engine is in DIR/SIDE.log. An engine that does not start, or
fails in a cell, is recorded and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import real_engine
import real_prompts
import real_summary
from real_records import (
    FAILED,
    MEASURED,
    REFERENCE,
    SKIPPED,
    VISITS,
    Cell,
    Job,
    Records,
    Visit,
    plan,
)
from turns import UNFINISHED, Gate, Turns, end, launch, take_core, wait

REQUESTS, CONTEXTS = (1, 8, 24, 96), (2048, 8192, 30720)
TEMPERATURES = (0.0, 0.6, 1.0)
_GRACE_S = 5.0  # an engine process ends by itself before it is ended


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.summary:
        return real_summary.write(args.out, args.summary, args.revision)
    records = Records(args.out / "records.jsonl")
    deadline = time.time() + args.seconds if args.seconds else float("inf")
    resolve_model(args)
    if args.retry and not args.child:
        records.forget_failures()
    leave_out_long_cells(args, records)
    if args.child:
        return serve(args, records)
    real_summary.identify(args)
    visits = plan(args.cells, args.sides, args.turns, most=1 if args.together else VISITS)
    at_once = len(args.sides) if args.together else 1
    run = Run(arguments, args, records, visits, deadline)
    for first in range(0, len(visits), at_once):
        if not run.work_through(visits[first : first + at_once]):
            left = sum(len(records.pending(visit.jobs)) for visit in visits)
            print(f"\n{left} measurements are left: run the command again", file=sys.stderr)
            return UNFINISHED
    Progress(visits, records).show("done")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="a Hugging Face folder, or smollm2")
    parser.add_argument("--head", default="", help="an EAGLE3 head; shipped: that of smollm2")
    parser.add_argument("--text", nargs="+", default=[], help="files in place of the default text")
    parser.add_argument("--out", type=Path, required=True, help="folder of records and logs")
    parser.add_argument("--sides", nargs="+", choices=real_engine.SIDES, default=[])
    sizes = [f"{requests}x{context}" for context in CONTEXTS for requests in REQUESTS]
    parser.add_argument("--cells", nargs="+", default=sizes, help="REQUESTSxCONTEXT")
    kinds = real_prompts.KINDS
    parser.add_argument("--prompts", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    parser.add_argument("--turns", type=int, default=2, help="measurements of a cell on each side")
    parser.add_argument("--tokens", type=int, default=128, help="of a request, on average")
    parser.add_argument("--warm-tokens", type=int, default=64, help="before, not counted")
    parser.add_argument("--cell-seconds", type=float, default=30, help="decoding, at most")
    parser.add_argument("--together", action="store_true", help="have all engines up at once")
    parser.add_argument("--share-prompts", action="store_true",
                        help="compute prompts once for all temperatures")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=0, help="of this call; 0: no limit")
    parser.add_argument("--retry", action="store_true", help="try again what has failed")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantisation", default="", help="of the weights, for the record")
    parser.add_argument(
        "--revision", default="", help="commit, for the record; default: the build's"
    )
    parser.add_argument("--set", type=json.loads, default={}, help="JSON: keys of the plugin")
    parser.add_argument("--engine", type=json.loads, default={},
                        help='JSON by side or "all": arguments of vLLM\'s LLM')  # fmt: skip
    parser.add_argument("--summary", type=Path, help="write the result of DIR there, run nothing")
    parser.add_argument("--child", choices=real_engine.SIDES, default="", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not args.model and not args.summary:
        parser.error("--model is missing")
    if not args.sides:
        left_out = {"idle"} | (set() if args.head else {"eagle3"})
        args.sides = [side for side in real_engine.SIDES if side not in left_out]
    if "eagle3" in args.sides and not args.head:
        parser.error("the side eagle3 needs --head")
    sizes = [tuple(map(int, cell.split("x"))) for cell in args.cells]
    args.cells = [
        Cell(requests, context, prompt, temperature)
        for requests, context in sizes
        for prompt in args.prompts
        for temperature in args.temperatures
    ]
    return args


def resolve_model(args: argparse.Namespace) -> None:
    """Makes the folders of the shipped names; `--dtype auto` is float32 on a CPU."""
    args.model_name = Path(args.model).name
    if args.model == "smollm2":
        import torch

        from nwor_specpv.models import smollm2

        if args.dtype == "auto":
            args.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        args.model, args.model_name = str(smollm2(args.dtype)), "SmolLM2-135M-Instruct"
        args.quantisation = args.quantisation or "Q4_1, unpacked"
    if args.head == "shipped":
        args.head = real_engine.shipped_head(args.out, args.model)


def leave_out_long_cells(args: argparse.Namespace, records: Records) -> None:
    """Skips cells that the model has no positions for, on all sides."""
    longest = real_engine.model_config(args.model)["max_position_embeddings"]
    args.cells, long_cells = (
        [cell for cell in args.cells if (cell.context > longest) == is_long]
        for is_long in (False, True)
    )
    why = f"the model has {longest} positions"
    jobs = [
        Job(cell, side, turn)
        for cell in long_cells
        for side in args.sides
        for turn in range(args.turns)
    ]
    records.add(*(job.record(SKIPPED, reason=why) for job in records.pending(jobs)))


class Run:
    """Starts the engines of visits, and waits for them."""

    def __init__(
        self, arguments: list[str], args: argparse.Namespace, records: Records,
        visits: list[Visit], deadline: float,
    ) -> None:  # fmt: skip
        self._arguments, self._args, self._records = arguments, args, records
        self._visits, self._deadline = visits, deadline
        self._progress = Progress(visits, records)

    def work_through(self, visits: list[Visit]) -> bool:
        """Runs the pending jobs of visits whose engines are up at once. False: there is no time
        left."""
        while some := [visit for visit in visits if self._records.pending(visit.jobs)]:
            first = self._records.pending(some[0].jobs)[0]
            starts = max(self._records.start_seconds(visit.side) for visit in some)
            needed = starts + self._records.job_seconds(first.cell)
            if time.time() + needed > self._deadline:
                return False
            codes = self._wait(
                [(visit, self._start(visit)) for visit in some], Gate(self._args.out)
            )
            for visit, code in zip(some, codes, strict=True):
                if code not in (0, UNFINISHED):
                    self._note_failure(visit, code)
            if UNFINISHED in codes or time.time() > self._deadline:
                return False
        return True

    def _start(self, visit: Visit) -> subprocess.Popen[bytes]:
        jobs = [job.record("pending") for job in self._records.pending(visit.jobs)]
        state = {"stage": "start", "visit": visit.number, "jobs": jobs}
        state_of(self._args, visit.side).write_text(json.dumps(state))
        until = self._deadline - _GRACE_S if self._args.seconds else 0
        command = [sys.executable, __file__, *self._arguments, "--child", visit.side]
        command += ["--deadline", str(until)]
        variables = real_engine.environment(visit.side, os.environ)
        return launch(command, variables, self._args.out / f"{visit.side}.log")

    def _wait(self, children: list[tuple[Visit, subprocess.Popen[bytes]]], gate: Gate) -> list[int]:
        def look() -> None:
            gate.look([visit.side for visit, child in children if child.poll() is None])
            self._progress.show(", ".join(visit.side for visit, _ in children))

        try:
            return [wait(child, self._deadline, look) for _, child in children]
        finally:
            for _, child in children:
                end(child)

    def _note_failure(self, visit: Visit, code: int) -> None:
        """Of an engine that did not start all jobs have failed, otherwise the one at hand."""
        state = json.loads(state_of(self._args, visit.side).read_text())
        why = state.get("reason", f"the engine process ended with status {code}")
        if state["stage"] == "start":
            jobs = [job for some in self._visits if some.side == visit.side for job in some.jobs]
            why = f"the engine did not start: {why}"
        else:
            jobs = [Job.of(state["job"])]
        failed = [job.record(FAILED, reason=why) for job in self._records.pending(jobs)]
        self._records.add(*failed)


def state_of(args: argparse.Namespace, side: str) -> Path:
    """What the process of a side is to do, and is doing."""
    return args.out / f"{side}.state.json"


class Progress:
    """One line on stderr: a bar on a terminal, else a line for each new measurement."""

    def __init__(self, visits: list[Visit], records: Records) -> None:
        self._jobs = [job for visit in visits for job in visit.jobs]
        self._records, self._latest = records, -1

    def show(self, what: str) -> None:
        total = len(self._jobs)
        done = total - len(self._records.pending(self._jobs))
        bar = "#" * (30 * done // max(1, total))
        line = f"[{bar:30}] {done} of {total}, {what}"
        if sys.stderr.isatty():
            print(f"\r{line}\033[K", end="" if done < total else "\n", file=sys.stderr, flush=True)
        elif done != self._latest:
            print(line, file=sys.stderr, flush=True)
        self._latest = done


def serve(args: argparse.Namespace, records: Records) -> int:
    """The engine process of one side: 0 when its jobs are done, UNFINISHED when time is up."""
    path = state_of(args, args.child)
    state = json.loads(path.read_text())
    jobs = [Job.of(record) for record in state.pop("jobs")]
    turns = Turns(args.out, args.child)
    try:
        worker = Worker(args, records, state["visit"], turns if args.together else None)
        if args.together:
            turns.wait()
        for job in jobs:
            with turns:
                if args.together and worker.on_gpu:  # on a CPU a model computes in many threads
                    take_core(args.cells.index(job.cell) + len(args.cells) * job.turn)
                if args.deadline and time.time() + records.job_seconds(job.cell) > args.deadline:
                    return UNFINISHED
                state = {"stage": "job", "job": job.record("running")}
                path.write_text(json.dumps(state))
                worker.measure(job)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {str(error).strip()[:400]}"
        path.write_text(json.dumps(state | {"reason": reason}))
        return 1
    return 0


class Worker:
    """An engine with its prompts."""

    def __init__(
        self, args: argparse.Namespace, records: Records, visit: int, turns: Turns | None
    ) -> None:
        import torch
        from real_measure import Bench, Size
        from transformers import AutoTokenizer

        began = time.monotonic()
        self._records = records
        self._size = Size(args.tokens, args.warm_tokens, args.cell_seconds)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self._prompts = real_prompts.Prompts(tokenizer, real_prompts.read_text(args.text))
        llm, told = real_engine.start(args.child, args, args.cells)
        self.on_gpu = torch.cuda.is_available()
        self._capacity = told["cache_tokens"]
        plugin = args.child in real_engine.OURS
        ends = end_tokens(args.model, tokenizer)
        self._bench = Bench(llm, ends, plugin=plugin, turns=turns)
        self._warm_up(args.cells)
        told |= {"ready_s": time.monotonic() - began, "visit": visit}
        records.add(told | {"text_tokens": self._prompts.text_tokens})

    def _warm_up(self, cells: list[Cell]) -> None:
        """What a process does once is done before the first cell, with texts of no cell."""
        from real_measure import Size

        fits = [cell for cell in cells if self._fits(cell)]
        sizes = {max(fits, key=lambda c: (c.context, -c.requests), default=None)}
        sizes |= {max(fits, key=lambda c: (c.requests, -c.context), default=None)}
        for cell in sizes - {None}:
            size = Size(self._size.tokens, 0, self._size.seconds)
            prompts = [[*prompt[1:], prompt[0]] for prompt in self._make(cell)]
            self._bench.run(prompts, cell.temperature, size)

    def _fits(self, cell: Cell) -> bool:
        return cell.requests * cell.context <= self._capacity

    def _make(self, cell: Cell) -> list[list[int]]:
        return self._prompts.make(cell.prompt, cell.requests, cell.context - self._size.room)

    def measure(self, job: Job) -> None:
        cell = job.cell
        if not self._fits(cell):
            why = f"the cache has room for {self._capacity} tokens"
            self._records.add(job.record(SKIPPED, reason=why))
            return
        sure = job.turn == REFERENCE
        found = self._bench.run(self._make(cell), cell.temperature, self._size, logprobs=sure)
        self._records.add(job.record(MEASURED, **found))


def end_tokens(model: str, tokenizer: Any) -> list[int]:
    """Tokens that end a text, by the model's own files."""
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found |= set(ends if isinstance(ends, list) else [ends])
    return sorted(found - {None})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
