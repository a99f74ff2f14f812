#!/usr/bin/env python3
"""A remote drafter beside local decoding: SmolLM2-135M-Instruct, greedy, one sequence at a time.

    python benchmarks/worker_remote.py --threads 2 --json out.json

A worker runs in a process of its own. This process decodes the same prompts locally (without
drafts, with n-grams) and as the worker's drafter, at once and with a simulated latency: half of it
passes before a call and half after it. Every way must write the same tokens. Ways take turns,
prompt by prompt.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nwor_specpv.bench.report import add_json_argument, machine, publish
from nwor_specpv.cli.demo.texts import CHAT, STORY
from nwor_specpv.cli.generate import add_model_arguments, encode, load, model_name
from nwor_specpv.cli.parser import Parser, count, counts
from nwor_specpv.drafters import TreeConfig, make_drafter
from nwor_specpv.errors import NworError
from nwor_specpv.transformers import Generator
from nwor_specpv.worker import Client
from nwor_specpv.worker.drafting import decode

# decode(prompt, count) -> (token ids, seconds, what else is known)
Way = Callable[[list[int], int], tuple[list[int], float, dict[str, Any]]]


class DelayedClient(Client):
    """A client on a machine that is some milliseconds away, there and back."""

    def __init__(self, address: str, latency_ms: float) -> None:
        super().__init__(address, timeout=600)
        self._pause = latency_ms / 2000

    def call(self, name: str, request: Any, **options: Any) -> Any:
        time.sleep(self._pause)
        reply = super().call(name, request, **options)
        time.sleep(self._pause)
        return reply


@contextmanager
def worker(arguments: Any) -> Iterator[str]:
    """The address of a worker in a process of its own."""
    command = [sys.executable, "-m", "nwor_specpv", "worker", "--port", "0"]
    command += ["--dtype", arguments.dtype, "--device", arguments.device]
    for name in ("model", "threads"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name}", str(value)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = re.match(r"worker: listening at ([^,]+),", process.stdout.readline())
            if found is None:
                raise NworError("worker: it did not start; its own message is above")
            yield found[1]
        finally:
            process.terminate()


def local(generator: Generator) -> Way:
    def run(prompt: list[int], num_tokens: int) -> tuple[list[int], float, dict[str, Any]]:
        begun = time.perf_counter()
        done = generator.generate(prompt, num_tokens)
        told = {"calls": done.stats.steps + 1}  # the prompt's pass gives the first token
        return done.token_ids, time.perf_counter() - begun, told

    return run


def remote(client: Client, drafter: str | None, rows: int, stop_ids: list[int]) -> Way:
    def run(prompt: list[int], num_tokens: int) -> tuple[list[int], float, dict[str, Any]]:
        done = decode(
            client,
            drafter and make_drafter(drafter),
            prompt,
            num_tokens,
            tree=TreeConfig(rows=rows, depth=8, top_k=2),
            stop_ids=stop_ids,
        )
        told = {"calls": done.calls, "drafts": done.drafts, "accepted": done.accepted}
        told |= {"run_seconds": done.run_seconds, "wait_seconds": done.wait_seconds}
        return done.token_ids, done.seconds, told

    return run


def measure(
    ways: dict[str, Way], prompts: list[list[int]], num_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    totals: dict[str, dict[str, Any]] = {
        name: {"way": name, "tokens": 0, "seconds": 0.0, "same_tokens": True} for name in ways
    }
    for turn in range(rounds + 1):  # the first one warms up and is not counted
        for prompt in prompts if turn else prompts[:1]:
            right: list[int] | None = None
            for name, way in ways.items():
                ids, seconds, told = way(prompt, num_tokens)
                right = right or ids
                total = totals[name]
                total["same_tokens"] &= ids == right
                if turn == 0:
                    continue
                for key, value in {"tokens": len(ids), "seconds": seconds, **told}.items():
                    total[key] = total.get(key, 0) + value
    plain = next(iter(totals.values()))
    for total in totals.values():
        total["tokens_per_second"] = total["tokens"] / total["seconds"]
        total["tokens_per_call"] = total["tokens"] / total["calls"]
        baseline = plain["tokens"] / plain["seconds"]
        total["ratio_to_first"] = total["tokens_per_second"] / baseline
    return list(totals.values())


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'way':32} {'tokens/s':>9} {'per call':>9} {'ratio':>6}  same tokens"]
    for row in rows:
        same = "yes" if row["same_tokens"] else "NO"
        lines.append(
            f"{row['way']:32} {row['tokens_per_second']:9.1f} {row['tokens_per_call']:9.2f} "
            f"{row['ratio_to_first']:6.2f}  {same}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = Parser(prog="worker_remote.py", description=__doc__)
    add_model_arguments(parser)
    add_json_argument(parser)
    parser.add_argument("--tokens", type=count, default=96, help="of each answer, default: 96")
    parser.add_argument("--rounds", type=count, default=1, help="default: 1")
    parser.add_argument("--prompts", type=count, default=4, help="default: 4")
    parser.add_argument(
        "--rows", type=counts, default=[8, 16], help="of draft trees, default: 8,16"
    )
    parser.add_argument(
        "--latency-ms", type=float, default=20.0, help="there and back, default: 20"
    )
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]  # of others, before this begins
    model, tokenizer = load(arguments)
    prompts = []
    for chat, story in zip(CHAT, STORY, strict=False):
        prompts += [encode(tokenizer, chat, raw=False), encode(tokenizer, story, raw=True)]
    prompts = prompts[: arguments.prompts]
    stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    with worker(arguments) as address, ExitStack() as stack:
        ways: dict[str, Way] = {
            "local, no drafts": local(Generator(model, tokenizer, "none")),
            "local, ngram": local(Generator(model, tokenizer, "ngram")),
        }
        for latency in (0.0, arguments.latency_ms):
            client = stack.enter_context(DelayedClient(address, latency))
            at = f"remote, {latency:g} ms"
            ways[f"{at}, no drafts"] = remote(client, None, 1, stop_ids)
            for rows in arguments.rows:
                ways[f"{at}, ngram, {rows} rows"] = remote(client, "ngram", rows, stop_ids)
        measured = measure(ways, prompts, arguments.tokens, arguments.rounds)
    result = {
        "machine": machine(arguments.device),
        "load_average": load_average,
        "model": model_name(arguments),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "prompts": len(prompts),
        "new_tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "latency_ms": arguments.latency_ms,
        "ways": measured,
    }
    publish(result, lambda report: table(report["ways"]), arguments.json)
    return 0 if all(row["same_tokens"] for row in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
