#!/usr/bin/env python3
"""Serving with and without the plugin, under traffic: OpenAI-compatible servers, asked in turn.

    python benchmarks/vllm/serving.py --model smollm2 --out DIR                       # chat lengths
    python benchmarks/vllm/serving.py --model FOLDER --lengths long32k --sides plain stock long \\
        --requests 48 --loads 50% all --server-args '--max-num-seqs 24' --out DIR --seconds 540
    python benchmarks/vllm/serving.py --model llama-3.1-8b --head dummy --out DIR   # 8B shapes
    python benchmarks/vllm/serving.py --out DIR --summary benchmarks/results/h200/serving_NAME.json

A load is a number of clients that wait for their answers (8c), requests a second at random moments
(2.5; 50% of what stock vLLM served of all), or all at once (all): see serving_load.py. Lengths of
prompts and answers are drawn from a table of lengths.json, prompts from real_prompts.py's text. All
sides get the same requests at the same moments, with the same drafter:

* plain: vLLM without drafts. * stock: vLLM as it comes. * nwor: with the plugin. * long: with the
plugin's `enable_specpv`, which without a head makes drafts of its own.

All servers start at once and are up all the time, each with a KV cache of the same size; one is
asked at a time, the others are idle. `llama-3.1-8b` has that model's shapes and dummy weights, and
`dummy` is such a head: how many of its drafts are accepted is preset by vLLM's own synthetic
sampler. Times are those of such a model then, words mean nothing.

Every measurement is a line of DIR/records.jsonl, and a later call goes on where one was stopped.
With --seconds a call ends in time, with status 75 while something is left.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
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
import serving_models
import serving_summary
from server_process import Server, has_gpu
from serving_load import Load
from serving_measure import Asked
from serving_models import SHAPES, SHAPES_HEAD
from serving_records import FAILED, MEASURED, PLAIN, STOCK, Job, Records, plan

SIDES = (PLAIN, STOCK, "nwor", "long")
LOADS = ("8c", "25%", "50%", "75%", "90%", "all")
UNFINISHED = 75
START_S = 900
WARM_REQUESTS = 4  # of the table that is measured, after as many short ones


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.summary:
        return serving_summary.write(args.out, args.summary)
    records = Records(args.out / "records.jsonl")
    if args.retry:
        records.drop(FAILED)
    serving_models.resolve(args)
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
    parser.add_argument("--model", default="smollm2", help=f"smollm2, {SHAPES}, or a folder")
    parser.add_argument("--head", default="",
                        help=f"an EAGLE3 head, shipped or {SHAPES_HEAD}: not n-grams")  # fmt: skip
    parser.add_argument("--speculation", type=json.loads, default={},
                        help="JSON: more keys of vLLM's speculative config")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of records and logs")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[STOCK, "nwor"])
    parser.add_argument("--lengths", choices=serving_load.tables()["tables"], default="chat")
    parser.add_argument("--loads", nargs="+", type=Load.parse, default=list(map(Load, LOADS)))
    parser.add_argument("--requests", type=int, default=200, help="of a load")
    parser.add_argument("--turns", type=int, default=2, help="measurements of a load on each side")
    parser.add_argument("--temperature", type=float, default=0.0)
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


def told_of(args: argparse.Namespace) -> dict[str, Any]:
    text = real_prompts.read_text(args.text)
    return {
        "model": args.name,
        "dtype": args.dtype,
        "head": Path(args.head).name if args.head else None,
        "drafter": {side: told_drafter(side, args) for side in args.sides},
        "temperature": args.temperature,
        "lengths": args.lengths,
        "requests_of_a_load": args.requests,
        "text": text.name,
        "text_sha256": text.sha256,
        "settings": args.set,
        "server_args": args.server_args,
        "side_args": args.side_args,
    }


def told_drafter(side: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """As the server is told, with the name of the head alone."""
    told = serving_models.speculation(side, args)
    return told | {"model": Path(args.head).name} if told and args.head else told


def server_arguments(side: str, args: argparse.Namespace) -> list[str]:
    told = ["--model", args.model, "--dtype", args.dtype, *args.load]
    told += ["--generation-config", "vllm"]  # a model's own penalties are left out
    drafts = serving_models.speculation(side, args)
    if drafts is not None:
        told += ["--speculative-config", json.dumps(drafts)]
    if side == "long" and args.head:
        told += ["--scheduler-cls", "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler"]
    more = [*shlex.split(args.server_args), *shlex.split(args.side_args.get(side, ""))]
    if "--max-model-len" not in more:
        told += ["--max-model-len", str(serving_load.longest(args.lengths) + 16)]
    if "--kv-cache-memory-bytes" not in more:
        told += ["--kv-cache-memory-bytes", str(serving_models.cache_bytes(len(args.sides)))]
    if has_gpu() and "--gpu-memory-utilization" not in more:
        told += ["--gpu-memory-utilization", "0.02"]  # the size of the cache is given
    return told + more


def work(args: argparse.Namespace, records: Records, jobs: list[Job]) -> None:
    """Starts the servers and measures until all is done or time is up."""
    from transformers import AutoTokenizer

    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = real_prompts.Prompts(tokenizer, real_prompts.read_text(args.text))
    with ExitStack() as stack:
        servers = start(args, records, stack)
        for server in servers.values():
            warm_up(args, server, prompts)
        for job in jobs:
            spent = time.monotonic() - began
            if args.seconds and spent + records.job_seconds(job.load) > args.seconds:
                return
            measure(job, args, records, servers[job.side], prompts)


def start(args: argparse.Namespace, records: Records, stack: ExitStack) -> dict[str, Server]:
    """All at once. `start_s` is until a server is ready, in the company of the others."""
    from engine_state import origin

    began, device, servers = time.monotonic(), server_process.device(), {}
    for side in args.sides:
        log, keys = args.out / f"{side}.log", serving_models.settings(side, args)
        told = server_arguments(side, args)
        # What is compiled at once for the same model is kept apart.
        cache = {"VLLM_CACHE_ROOT": str(args.out.resolve() / "compiled" / side)}
        servers[side] = server_process.launch(side, told, log, settings=keys, variables=cache)
        stack.callback(server_process.end, servers[side])
    waiting = list(args.sides)
    while waiting:
        for side in [one for one in waiting if server_process.is_ready(servers[one])]:
            waiting.remove(side)
            told = {"server": side, "start_s": time.monotonic() - began, "device": device}
            records.add(told | {"python": platform.python_version()} | origin())
        if time.monotonic() - began > START_S:
            raise SystemExit(f"after {START_S} s these are not ready: {', '.join(waiting)}")
        time.sleep(0.5)
    return servers


def warm_up(args: argparse.Namespace, server: Server, prompts: real_prompts.Prompts) -> None:
    """What a server does once is done before it is measured."""
    sizes = [one for table in ("tiny", args.lengths)
             for one in serving_load.draw(table, WARM_REQUESTS, 0)]  # fmt: skip
    windows = prompts.windows([one.prompt for one in sizes], 0)
    asked = [Asked(*one, 0.0, args.temperature) for one in zip(windows, sizes, strict=True)]
    serving_measure.run(server, Load("4c"), asked)


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
    asked = [Asked(*one, args.temperature) for one in zip(windows, sizes, moments, strict=True)]
    try:
        found = serving_measure.run(server, load, asked)
    except (RuntimeError, OSError) as error:
        records.add(job.record(FAILED, reason=str(error)))
        print(f"{job.side:6} {load.name:>6}: {error}", flush=True)
        return
    offered = None if rate == math.inf else rate
    records.add(job.record(MEASURED, offered_per_s=offered, **found))
    times = (found["first_ms"]["p50"], found["token_ms"]["p50"], found["token_ms"]["p99"])
    print(
        f"{job.side:6} {load.name:>6} turn {job.turn}: {found['tokens_per_s']:9.1f} tokens/s, "
        f"first {times[0]:.0f} ms, tokens {times[1]:.2f} ms, p99 {times[2]:.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
