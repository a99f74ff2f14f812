#!/usr/bin/env python3
"""A server of vLLM with the plugin under traffic of every kind, for as long as one likes.

    python benchmarks/vllm/soak.py --model smollm2 --minutes 30 --rate 2 --most-open 14 --out DIR
    python benchmarks/vllm/soak.py --model smollm2 --minutes 10 --out DIR --rate 300 \\
        --most-open 64 --cache-share 0.2                                         # on a GPU

Clients come at random moments (Poisson) with the requests of soak_traffic.py: mixed lengths, greedy
and sampled, stop strings, structured output, LoRA, shared prefixes, and clients that leave amid
their answer. The KV cache is too small for all of them, so that requests are preempted.

Meanwhile and at the end it is checked (see soak_books.py) that every staged token was committed or
rejected, nothing was bypassed, no memory grows, no line is logged twice, a request that is sent
again gets the same text (on a CPU in float32; counted elsewhere, where vLLM promises less), nothing
is left when all is quiet, and the server ends when it is asked to. DIR/soak.json is the result,
--json FILE a copy of it; the exit status is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import http_client
import psutil
import server_process
import soak_adapters
from server_process import Server, has_gpu
from soak_books import MIB, Answers, Counters, Memory, verdict
from soak_traffic import Request, Traffic, arrivals

DRAFTS = 4
SEQUENCES = 8  # on a CPU
GPU_SEQUENCES = 32
LENGTH = 1024  # prompt and answer together
PROMPT, ANSWER = 400, 128
# Rows of a step on a CPU: vLLM's products there keep memory for each number of rows they have had,
# up to 128 for each weight, which would grow for hours.
CPU_ROWS = 64
STEPS_UNDER_WAY = 2


class Soak:
    """One run. Thread-safety: none."""

    def __init__(self, args: argparse.Namespace, server: Server, traffic: Traffic) -> None:
        self._args, self._server, self._traffic = args, server, traffic
        self.answers, self.memory = Answers(), Memory()
        most_open = STEPS_UNDER_WAY * args.sequences * DRAFTS
        self.counters = Counters(most_open)
        self.engine: dict[str, float] = {}  # of vLLM's counters
        self.own: dict[str, float] = {}
        self._began = time.perf_counter()

    async def run(self) -> None:
        self._began = time.perf_counter()
        async with http_client.session() as client:
            watching = asyncio.create_task(self._watch())
            try:
                await self._send(client)
            finally:
                watching.cancel()
            await self._finish(client)

    async def _send(self, client: Any) -> None:
        """Requests at their moments; while `--most-open` are open, others wait to be sent."""
        room = asyncio.Semaphore(self._args.most_open)
        seconds, tasks = 60 * self._args.minutes, set()
        for moment in arrivals(self._args.rate, self._args.seed):
            await asyncio.sleep(max(0.0, moment - self._elapsed()))
            await room.acquire()
            if max(moment, self._elapsed()) > seconds or self.gone:
                break
            task = asyncio.create_task(self._one(client, next(self._traffic), room))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _one(self, client: Any, request: Request, room: asyncio.Semaphore) -> None:
        try:
            url = self._server.url
            reply = await http_client.ask(client, url, request.body, request.leave_after)
            self.answers.note(request, reply)
        finally:
            room.release()

    @property
    def gone(self) -> bool:
        return self._server.process.poll() is not None

    async def _watch(self) -> None:
        while not self.gone:
            await asyncio.sleep(self._args.every)
            with contextlib.suppress(OSError, psutil.NoSuchProcess):  # the server has gone
                await asyncio.to_thread(self.look)

    def look(self) -> None:
        if self._server.metrics:
            self.counters.note(server_process.scrape(self._server.metrics))
        front = psutil.Process(self._server.process.pid)
        others = front.children(recursive=True)
        engine = sum(process.memory_info().rss for process in others)
        sizes = {"front end": front.memory_info().rss, "engine": engine}
        if has_gpu():
            sizes["device"] = device_bytes({process.pid for process in (front, *others)})
        self.memory.note(self._elapsed(), **sizes)

    async def _finish(self, client: Any) -> None:
        """One more request, after which nothing of the others may be left."""
        if self.gone:
            self.counters.problems.append("the server has gone: see its log")
            return
        body = {"prompt": "one two three one two three", "temperature": 0, "max_tokens": 8}
        reply = await http_client.ask(client, self._server.url, body)
        self.answers.note(Request("last", body), reply)
        await asyncio.sleep(2 * self._args.every)
        engine = server_process.scrape(f"{self._server.url}/metrics")
        own = server_process.scrape(self._server.metrics) if self._server.metrics else None
        self.counters.end(own, engine)
        if own is not None:
            names = ("staged", "committed", "rejected", "failed")
            self.own = {name: own.total(f"nwor_{name}_tokens_total") for name in names}
            self.own |= {"rounds": own.total("nwor_rounds_total")}
        names = ("num_preemptions", "prefix_cache_hits", "prefix_cache_queries",
                 "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")  # fmt: skip
        self.engine = {name: engine.total(f"vllm:{name}_total") for name in names}

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began


def device_bytes(pids: set[int]) -> float:
    """Memory of GPUs that these processes have; of all, where the driver does not know them."""
    lines = ask_driver("--query-compute-apps=pid,used_gpu_memory")
    pairs = [line.split(", ") for line in lines]
    own = [float(mib) for pid, mib in pairs if int(pid) in pids and mib.isdigit()]
    return MIB * (sum(own) or sum(map(float, ask_driver("--query-gpu=memory.used"))))


def ask_driver(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {args.seed}", flush=True)
    log = args.out / "server.log"
    log.unlink(missing_ok=True)
    keys = None if args.stock else args.set
    server = server_process.launch("soak", server_arguments(args), log, settings=keys)
    try:
        server_process.wait_until_ready(server)
        soak = Soak(args, server, make_traffic(args))
        asyncio.run(soak.run())
    finally:
        ended = server_process.end(server)
    exact = not has_gpu() and args.dtype == "float32"
    told = log.read_text(errors="replace")
    grown = soak.memory.problems(args.growth_mib)
    problems = verdict(soak.answers, soak.counters, grown, told, exact=exact)
    if ended.status != 0 or ended.left:
        problems.append(f"the server ended with {ended.status}, {ended.left} processes were left")
    return report(args, soak, problems)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the log and the result")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=4, help="requests a second")
    parser.add_argument("--most-open", type=int, default=32, help="requests at once")
    sequences = GPU_SEQUENCES if has_gpu() else SEQUENCES
    parser.add_argument("--sequences", type=int, default=sequences, help="vLLM's --max-num-seqs")
    parser.add_argument("--cache-share", type=float, default=0.35,
                        help="of a full batch of the longest requests in the KV cache")  # fmt: skip
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--growth-mib", type=float, default=32, help="of memory, after warming up")
    parser.add_argument("--dtype", default="bfloat16" if has_gpu() else "float32")
    parser.add_argument("--no-lora", action="store_true", help="for models without q_proj, v_proj")
    parser.add_argument("--stock", action="store_true",
                        help="without the plugin: is it vLLM's doing?")  # fmt: skip
    parser.add_argument("--set", type=json.loads, default={}, help="JSON: keys of the plugin")
    parser.add_argument("--server-args", default="", help="more arguments of vLLM's server")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    args = parser.parse_args(arguments)
    args.name = Path(args.model).name
    if args.model == "smollm2":
        from nwor_specpv.models import smollm2

        args.model, args.name = str(smollm2(args.dtype)), "SmolLM2-135M-Instruct"
    return args


def server_arguments(args: argparse.Namespace) -> list[str]:
    token = soak_adapters.cache_bytes_of_a_token(args.model, args.dtype)
    room = int(args.cache_share * args.sequences * (PROMPT + ANSWER))
    drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4}
    told = ["--model", args.model, "--dtype", args.dtype, "--max-model-len", str(LENGTH)]
    told += ["--max-num-seqs", str(args.sequences)]
    told += ["--max-num-batched-tokens", str(LENGTH if has_gpu() else CPU_ROWS)]
    told += ["--kv-cache-memory-bytes", str(token * max(room, LENGTH + ANSWER))]
    told += ["--speculative-config", json.dumps(drafts)]
    if not has_gpu():
        told += ["--enforce-eager"]
    if not args.no_lora:
        told += soak_adapters.make(args.out, args.model)
    return [*told, *shlex.split(args.server_args)]


def make_traffic(args: argparse.Namespace) -> Traffic:
    from nwor_specpv.cli.demo.texts import BOOK

    adapters = [] if args.no_lora else soak_adapters.NAMES
    text = BOOK.read_text(encoding="utf-8")
    sizes = {"prompt_tokens": PROMPT, "answer_tokens": ANSWER}
    # On a CPU vLLM's own sampler divides by memory that nobody wrote where a step has drafts and a
    # sampled request: `expand_batch_to_tokens` fills a copy of its output. Greedy ones suffer too.
    return Traffic(text, args.seed, adapters=adapters, sampled=has_gpu(), **sizes)


def report(args: argparse.Namespace, soak: Soak, problems: list[str]) -> int:
    from engine_state import origin

    told = origin() | {"minutes": args.minutes, "rate": args.rate, "seed": args.seed}
    told |= {"device": server_process.device(), "model": args.name, "dtype": args.dtype}
    told |= {"sequences": args.sequences, "cache_share": args.cache_share}
    told |= {"server_args": args.server_args, "settings": args.set, "plugin": not args.stock}
    told |= soak.answers.summary() | {"counters": soak.own}
    told["vllm_counters"] = soak.engine
    told["memory_mib"] = {name: soak.memory.growth(name) for name in soak.memory.series}
    told["problems"] = problems
    text = json.dumps(told, indent=1)
    for path in filter(None, (args.out / "soak.json", args.json)):
        path.write_text(text + "\n", encoding="utf-8")
    print(text)
    for problem in problems:
        print(f"WRONG: {problem}")
    print("something is wrong" if problems else "all is well")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
