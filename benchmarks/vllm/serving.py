#!/usr/bin/env python3
"""Serving with and without the plugin: two OpenAI-compatible servers, the same clients in turns.

    python benchmarks/vllm/serving.py --model smollm2 --clients 4 --requests 24 --repeats 3

Prints, per server, output tokens a second, the time to the first token and between tokens (median
and 99th percentile), and the ratio of the medians. Both servers are up all the time; only one of
them is asked at a time. `--server-args` goes to both.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = "Write the numbers from {} to {} in words, separated by commas. Then write them once more."


@dataclass
class Server:
    name: str
    url: str
    process: subprocess.Popen[bytes]
    tokens_per_s: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)


def main() -> int:
    args = parse()
    with ExitStack() as stack:
        servers = []
        for name in ("stock", "nwor"):
            servers.append(start(args, name))
            stack.callback(stop, servers[-1].process)
            if has_gpu():  # a server that starts measures how much memory is free
                wait_until_ready(servers[-1])
        for server in servers:
            wait_until_ready(server)
        for number in range(args.repeats + 1):
            for server in servers if number % 2 else servers[::-1]:
                measure(args, server, counted=number > 0)
        report = {server.name: summarise(server) for server in servers}
    size = f"{args.requests} requests of {args.tokens} tokens"
    print(f"{args.clients} clients, {size}, {args.repeats} repeats")
    print("          tokens/s   first ms p50/p99       gap ms p50/p99")
    for name, row in report.items():
        first, gap = row["first_ms"], row["gap_ms"]
        print(
            f"{name:8} {row['tokens_per_s']:9.1f}   {first[0]:8.1f} {first[1]:8.1f}"
            f"     {gap[0]:8.2f} {gap[1]:8.2f}"
        )
    ratio = report["nwor"]["gap_ms"][0] / report["stock"]["gap_ms"][0]
    print(f"nwor/stock, time between tokens: {ratio:.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(report | {"ratio": ratio}, indent=2))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2 or anything vLLM loads")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--server-args", default="", help="for both, such as '--dtype float32'")
    parser.add_argument("--json", default="", help="write the results there")
    return parser.parse_args()


def start(args: argparse.Namespace, name: str) -> Server:
    model = args.model
    if model == "smollm2":
        from nwor_specpv.models import smollm2

        model = str(smollm2("bfloat16"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    drafts = {"method": "ngram", "num_speculative_tokens": args.drafts, "prompt_lookup_max": 4}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--speculative-config", json.dumps(drafts), *shlex.split(args.server_args)]
    if has_gpu() and "--gpu-memory-utilization" not in args.server_args:
        command += ["--gpu-memory-utilization", "0.4"]  # both have to fit
    # Two servers that bind their threads to the same cores would wait for each other.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | dict(os.environ)
    if name == "stock":
        env["VLLM_PLUGINS"] = "none"
    elif has_gpu():
        command += ["--attention-backend", "CUSTOM"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    return Server(name, f"http://127.0.0.1:{port}", process)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(timeout=60)


def wait_until_ready(server: Server) -> None:
    for _ in range(1200):
        if server.process.poll() is not None:
            raise SystemExit(f"the server {server.name} ended with {server.process.returncode}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise SystemExit(f"the server {server.name} is not ready after ten minutes")


def measure(args: argparse.Namespace, server: Server, *, counted: bool) -> None:
    started = time.perf_counter()
    with ThreadPoolExecutor(args.clients) as pool:
        arrivals = list(pool.map(lambda i: ask(server, i, args.tokens), range(args.requests)))
    seconds = time.perf_counter() - started
    if not counted:
        return
    server.tokens_per_s.append(args.requests * args.tokens / seconds)
    for times in arrivals:
        server.first_ms.append(1e3 * times[0])
        # A step emits several tokens at once; what a reader feels is the time per token.
        server.gap_ms.append(1e3 * (times[-1] - times[0]) / max(1, args.tokens - 1))


def ask(server: Server, index: int, tokens: int) -> list[float]:
    """Seconds from asking to each piece of the streamed answer."""
    body: dict[str, Any] = {
        "model": "model",
        "prompt": PROMPT.format(index, index + 9),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    started, times = time.perf_counter(), []
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - started)
    return times


def summarise(server: Server) -> dict[str, Any]:
    def spread(values: list[float]) -> tuple[float, float]:
        return statistics.median(values), sorted(values)[int(0.99 * (len(values) - 1))]

    return {
        "tokens_per_s": statistics.median(server.tokens_per_s),
        "first_ms": spread(server.first_ms),
        "gap_ms": spread(server.gap_ms),
    }


if __name__ == "__main__":
    raise SystemExit(main())
