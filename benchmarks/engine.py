#!/usr/bin/env python3
"""The engine in C++ (examples/engine) beside the transformers host: tokens per second of both.

    python benchmarks/engine.py --engine build/engine/engine [--json FILE] [--new-tokens 64]
    python benchmarks/engine.py --device cuda --new-tokens 512

SmolLM2-135M-Instruct, greedy, one batch of four chats; float32 on the CPU, bfloat16 on a GPU. Both
take turns, and the best of each counts. Loading is left out; prompts count, and so does what the
engine's process does for the first time. Trees have 8 rows on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nwor_specpv.bench.report import add_json_argument, machine, publish
from nwor_specpv.cli.generate import encode
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.drafters.eagle3 import SHIPPED
from nwor_specpv.errors import NworError
from nwor_specpv.models import smollm2
from nwor_specpv.transformers import Generator

QUESTIONS = (
    "Why is the sky blue?",
    "Write an email asking for a day off.",
    "Explain what a computer program is.",
    "How do you make pancakes?",
)
METHODS = ("none", "ngram", "eagle3")
TREE = TreeConfig(rows=8)


def run_engine(
    program: Path, folder: Path, device: str, method: str, prompts: Path, count: int
) -> Any:
    command = [program, "--model", folder, "--ids", prompts, "--method", method]
    command += ["--device", device]
    command += ["--head", SHIPPED, "--max-new-tokens", count, "--tree-rows", TREE.rows]
    command += ["--ignore-eos", "true"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise NworError(f"{program}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def load(device: str) -> tuple[Path, dict[str, Generator]]:
    """The model's folder, and a host for each method."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = "float32" if device == "cpu" else "bfloat16"
    folder = smollm2(dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return folder, {method: Generator(model, tokenizer, method) for method in METHODS}


def measure(program: Path, device: str, new_tokens: int, turns: int) -> dict[str, Any]:
    folder, hosts = load(device)
    tokenizer = hosts["none"].tokenizer
    prompts = [encode(tokenizer, question, raw=False) for question in QUESTIONS]
    best: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    same: dict[str, bool] = dict.fromkeys(METHODS, True)
    with tempfile.TemporaryDirectory() as place:
        ids = Path(place) / "prompts.json"
        ids.write_text(json.dumps(prompts))
        for _ in range(turns):
            for method, host in hosts.items():
                host.forget()  # no prompt is cached on either side
                told = host.generate(prompts, new_tokens, eos_token_id=-1, tree=TREE)
                seconds = told.stats.prefill_seconds + told.stats.decode_seconds
                result = run_engine(program, folder, device, method, ids, new_tokens)
                rates = {
                    "host": told.stats.new_tokens / seconds,
                    "engine": result["stats"]["new_tokens"] / result["stats"]["seconds"],
                }
                for side, rate in rates.items():
                    best[method][side] = max(rate, best[method].get(side, 0.0))
                same[method] &= result["token_ids"] == told.token_ids
    return {
        "cells": [
            {"method": method, **best[method], "same_tokens": same[method]} for method in METHODS
        ],
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "turns": turns,
    }


def describe(report: dict[str, Any]) -> str:
    lines = ["method   host tokens/s   engine tokens/s   ratio   same tokens"]
    for cell in report["cells"]:
        ratio = cell["engine"] / cell["host"]
        lines.append(
            f"{cell['method']:8} {cell['host']:13.1f} {cell['engine']:17.1f} {ratio:7.2f}   "
            f"{cell['same_tokens']}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", type=Path, default=Path("build/engine/engine"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    add_json_argument(parser)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    report = machine(arguments.device) | measure(
        arguments.engine, arguments.device, arguments.new_tokens, arguments.turns
    )
    report["load_before"] = round(before, 1)  # other programs that ran: 0 on a quiet machine
    return publish(report, describe, arguments.json)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NworError as error:
        sys.exit(f"engine benchmark: {error}")
