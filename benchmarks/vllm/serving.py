#!/usr/bin/env python3
"""Serving with and without the plugin, under traffic: OpenAI-compatible servers, asked in turn.

    python benchmarks/vllm/serving.py --model smollm2 --out DIR                       # chat lengths
    python benchmarks/vllm/serving.py --model FOLDER --head HEAD --lengths long \\
        --sides stock nwor long --loads 4c 25% 50% 75% 90% all --out DIR --seconds 540
    python benchmarks/vllm/serving.py --out DIR --summary benchmarks/results/h200/serving_NAME.json

A load is a number of clients that wait for their answers (8c), requests a second at random moments
(2.5; 50% of what stock vLLM served of all), or all at once (all): see serving_load.py. Lengths of
prompts and answers are drawn from a table of lengths.json, prompts from real_prompts.py's text. All
sides get the same requests at the same moments, with the same drafter:

* stock: vLLM as it comes. * nwor: with the plugin. * long: with the plugin's `enable_specpv`.

All servers are up all the time, each with its share of a GPU's memory; one is asked at a time, the
others are idle. Every measurement is a line of DIR/records.jsonl, and a later call goes on where
one was stopped. With --seconds a call ends in time, with status 75 while something is left.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import real_prompts
import server_process
import serving_load
import serving_measure
import serving_summary
from real_engine import shipped_head
from server_process import Server, has_gpu
from serving_load import Load
from serving_measure import Asked
from serving_records import FAILED, MEASURED, STOCK, Job, Records, plan

SIDES = (STOCK, "nwor", "long")
LOADS = ("8c", "25%", "50%", "75%", "90%", "all")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
HEAD_DRAFTS, LONG_DRAFTS = 4, 15
UNFINISHED = 75
MEMORY = 0.9  # of a GPU, of all servers together


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.summary:
        return serving_summary.write(args.out, args.summary)
    records = Records(args.out / "records.jsonl")
    if args.retry:
        records.drop(FAILED)
    resolve(args)
    serving_summary.identify(args.out, told_of(args))
    jobs = plan(args.loads, args.sides, args.turns)
    left = records.pending(jobs)
    if left:
        work(args, records, left)
    left = records.pending(jobs)
    if left:
        print(f"\n{len(left)} measurements are left: run the command again", file=sys.stderr)
        return UNFINISHED
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Hugging Face folder")
    parser.add_argument("--head", default="",
                        help="an EAGLE3 head, or shipped: in place of n-grams")  # fmt: skip
    parser.add_argument("--speculation", type=json.loads, default={},
                        help="JSON: more keys of vLLM's speculative config")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of records and logs")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES[:2]))
    parser.add_argument("--lengths", choices=serving_load.tables()["tables"], default="chat")
    parser.add_argument("--loads", nargs="+", type=Load.parse, default=list(map(Load, LOADS)))
    parser.add_argument("--requests", type=int, default=200, help="of a load")
    parser.add_argument("--turns", type=int, default=2, help="measurements of a load on each side")
    parser.add_argument("--text", nargs="+", default=[], help="files in place of the default text")
    parser.add_argument("--seconds", type=float, default=0, help="of this call; 0: no limit")
    parser.add_argument("--retry", action="store_true", help="try again what has failed")
    parser.add_argument("--dtype", default="bfloat16" if has_gpu() else "float32")
    parser.add_argument("--set", type=json.loads, default={}, help="JSON: keys of the plugin")
    parser.add_argument("--server-args", default="", help="of vLLM, for all: '--max-num-seqs 64'")
    parser.add_argument("--side-args", type=json.loads, default={},
                        help='JSON, more of them by side: {"long": "--block-size 32"}')  # fmt: skip
    parser.add_argument("--summary", type=Path, help="write the result of DIR there, run nothing")
    return parser.parse_args(arguments)


def resolve(args: argparse.Namespace) -> None:
    """Makes the folders of the shipped names."""
    args.name = Path(args.model).name
    if args.model == "smollm2":
        from nwor_specpv.models import smollm2

        args.model, args.name = str(smollm2(args.dtype)), "SmolLM2-135M-Instruct"
    if args.head == "shipped":
        args.head = shipped_head(args.out, args.model)


def told_of(args: argparse.Namespace) -> dict[str, Any]:
    text = real_prompts.read_text(args.text)
    return {
        "model": args.name,
        "dtype": args.dtype,
        "head": Path(args.head).name if args.head else None,
        "drafter": {side: speculation(side, args) for side in args.sides},
        "lengths": args.lengths,
        "requests_of_a_load": args.requests,
        "text": text.name,
        "text_sha256": text.sha256,
        "settings": args.set,
        "server_args": args.server_args,
        "side_args": args.side_args,
    }


def speculation(side: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's speculative config. Without a head `enable_specpv` chooses one itself."""
    if args.head:
        drafts = LONG_DRAFTS if side == "long" else HEAD_DRAFTS
        told = {"method": "eagle3", "model": args.head, "num_speculative_tokens": drafts}
        return told | args.speculation
    return None if side == "long" else NGRAM | args.speculation


def server_arguments(side: str, args: argparse.Namespace) -> list[str]:
    told = ["--model", args.model, "--dtype", args.dtype]
    drafts = speculation(side, args)
    if drafts is not None:
        told += ["--speculative-config", json.dumps(drafts)]
    if side == "long" and args.head:
        told += ["--scheduler-cls", "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler"]
    more = [*shlex.split(args.server_args), *shlex.split(args.side_args.get(side, ""))]
    if "--max-model-len" not in more:
        told += ["--max-model-len", str(serving_load.longest(args.lengths) + 16)]
    if has_gpu() and "--gpu-memory-utilization" not in more:
        told += ["--gpu-memory-utilization", f"{MEMORY / len(args.sides):.2f}"]
    return told + more


def settings(side: str, args: argparse.Namespace) -> dict[str, Any] | None:
    if side == STOCK:
        return None
    return ({"enable_specpv": True} if side == "long" else {}) | args.set


def work(args: argparse.Namespace, records: Records, jobs: list[Job]) -> None:
    """Starts the servers and measures until all is done or time is up."""
    from transformers import AutoTokenizer

    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = real_prompts.Prompts(tokenizer, real_prompts.read_text(args.text))
    with ExitStack() as stack:
        servers = {side: start(side, args, records, stack) for side in args.sides}
        for server in servers.values():
            warm_up(server, prompts)
        for job in jobs:
            spent = time.monotonic() - began
            if args.seconds and spent + records.job_seconds(job.load) > args.seconds:
                return
            measure(job, args, records, servers[job.side], prompts)


def start(side: str, args: argparse.Namespace, records: Records, stack: ExitStack) -> Server:
    """One after the other: a server that starts measures how much memory is free."""
    from engine_state import origin

    began = time.monotonic()
    keys = settings(side, args)
    log = args.out / f"{side}.log"
    server = server_process.launch(side, server_arguments(side, args), log, settings=keys)
    stack.callback(server_process.end, server)
    server_process.wait_until_ready(server)
    told = {"server": side, "start_s": time.monotonic() - began, "device": device()}
    records.add(told | {"python": platform.python_version()} | origin())
    return server


def device() -> str:
    if not has_gpu():
        return f"{platform.machine()} CPU"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def warm_up(server: Server, prompts: real_prompts.Prompts) -> None:
    """What a server does once is done before it is measured."""
    load = Load("4c")
    sizes = serving_load.draw("tiny", 8, 0)
    windows = prompts.windows([one.prompt for one in sizes], 0)
    asked = [Asked(prompt, one, 0.0) for prompt, one in zip(windows, sizes, strict=True)]
    serving_measure.run(server, load, asked)


def measure(
    job: Job, args: argparse.Namespace, records: Records, server: Server,
    prompts: real_prompts.Prompts,
) -> None:  # fmt: skip
    load = job.load
    if load.share and not records.most():
        records.add(job.record(FAILED, reason="stock vLLM has not served all at once"))
        return
    seed, rate = serving_load.seed_of(load, job.turn), load.rate(records.most())
    sizes = serving_load.draw(args.lengths, args.requests, seed)
    windows = prompts.windows([one.prompt for one in sizes], seed)
    moments = serving_load.moments(args.requests, rate, seed)
    asked = [Asked(*one) for one in zip(windows, sizes, moments, strict=True)]
    try:
        found = serving_measure.run(server, load, asked)
    except (RuntimeError, OSError) as error:
        records.add(job.record(FAILED, reason=str(error)))
        print(f"{job.side:6} {load.name:>6}: {error}", flush=True)
        return
    offered = None if rate == float("inf") else rate
    records.add(job.record(MEASURED, offered_per_s=offered, **found))
    times = (found["first_ms"]["p50"], found["token_ms"]["p50"], found["token_ms"]["p99"])
    print(
        f"{job.side:6} {load.name:>6} turn {job.turn}: {found['tokens_per_s']:9.1f} tokens/s, "
        f"first {times[0]:.0f} ms, tokens {times[1]:.2f} ms, p99 {times[2]:.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
