"""Whole steps of the transformers host, full and partial, over long made-up contexts.

    python benchmarks/generate_gpu.py --json FILE            # on a GPU, Llama-3.1-8B's shapes

Weights are random and the context's K/V too: what is measured is time, with an acceptance that is
set. A step is everything from the batch's tensors to the commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from nwor_specpv import NworConfig, PartialStore, SpecPVConfig, VerifyPolicy
from nwor_specpv.bench.report import machine, numbers
from nwor_specpv.transformers.request import Part, Request
from nwor_specpv.transformers.round import Round
from nwor_specpv.transformers.runner import ModelRunner

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 18,
    "rope_theta": 500000.0,
}
TINY = LLAMA_8B | {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GOAL = 1.8  # times as fast as a full step, at 8 x 32768


class Steps:
    """A batch of requests that grows by what is accepted."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, rows: int, accepted: int):
        self._runner, self._rows, self._accepted = runner, rows, accepted
        runner.reserve(batch * (context + 4096))
        for side in (runner.cache.keys, runner.cache.values):
            side.normal_()
        self._requests = []
        for index in range(batch):
            request = Request(runner.new_key(), index, [0] * (context + 1), context, 1, 0, 0)
            runner.cache.allocator.extend(request.key, context)
            request.cached = context
            self._requests.append(request)

    def end(self) -> None:
        for request in self._requests:
            self._runner.cache.allocator.free(request.key)

    def run(self, store: PartialStore | None, policy: VerifyPolicy | None) -> str:
        """One step of all requests; what kind it was."""
        parts = [
            Part(r, [], [0] * self._rows, [*range(-1, self._rows - 1)], r.cached)
            for r in self._requests
        ]
        kind = "full"
        if store is not None:
            for part in parts:
                request = part.request
                decision = policy.decide(request.partial, self._rows)
                part.decision, part.prefix_len = decision, decision.prefix_len
                part.fed = request.tokens[decision.prefix_len : decision.committed_len]
                kind = decision.kind
            store.begin([(part.request.partial, part.decision) for part in parts])
            keys = [request.key for request in self._requests]
            store.build_views(self._runner.cache.block_table(keys))
        round_ = Round(self._runner, parts)
        round_.run(store, len(parts))
        round_.tree_logits().argmax(-1).tolist()
        round_.commit([[*range(1, self._accepted + 1)]] * len(parts))
        for part in parts:
            part.request.tokens += [0] * (self._accepted + 1)
            part.request.cached = len(part.request.tokens) - 1
            if store is not None:
                part.request.partial.finish(part.decision, self._accepted)
        return kind

    def open_views(self, config: SpecPVConfig, context: int) -> PartialStore:
        caches = self._runner.cache.caches
        store = PartialStore(
            config,
            [key for key, _ in caches],
            [value for _, value in caches],
            max_requests=len(self._requests),
            max_tokens=context + 4096,
            max_rows=self._rows,
        )
        for request in self._requests:
            request.partial = store.open(context)
            request.partial.prefill(request.cached)
        return store


def measure(runner: ModelRunner, batch: int, context: int, arguments: Any) -> dict[str, Any]:
    config = SpecPVConfig(enable_specpv=True, specpv_rectify=arguments.mode)
    if arguments.tiny:
        config.specpv_n_retrieval_blocks = 4
    steps = Steps(runner, batch, context, arguments.rows, arguments.accepted)
    taken: dict[str, list[float]] = {"full": [], "partial": [], "full_refresh": []}

    def run(count: int, store: PartialStore | None, policy: VerifyPolicy | None) -> None:
        for turn in range(count):
            runner.synchronize()
            started = time.perf_counter()
            kind = steps.run(store, policy)
            runner.synchronize()
            if turn >= 2:
                taken[kind].append(time.perf_counter() - started)

    with runner.installed():
        run(arguments.steps, None, None)
        run(3 * arguments.steps, steps.open_views(config, context), VerifyPolicy(config))
    steps.end()
    return {
        "batch": batch,
        "context": context,
        "ms": {kind: 1000 * min(times) for kind, times in taken.items() if times},
        "steps": {kind: len(times) for kind, times in taken.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=numbers, default=[8192, 32768, 131072])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--accepted", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mode", default="rectify", choices=["rectify", "refresh"])
    parser.add_argument("--tiny", action="store_true", help="a model that any machine runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        config = LlamaConfig(**(TINY if arguments.tiny else LLAMA_8B))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    runner = ModelRunner(model, NworConfig())
    report = machine(device) | {"mode": arguments.mode, "goal": GOAL, "results": []}
    for context in arguments.contexts:
        for batch in arguments.batches:
            try:
                result = measure(runner, batch, context, arguments)
            except torch.OutOfMemoryError:
                result = {"batch": batch, "context": context, "problem": "not enough memory"}
            report["results"].append(result)
            times = result.get("ms", {})
            told = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in times.items())
            ratio = times.get("full", 0) / times["partial"] if "partial" in times else 0
            print(f"{batch} x {context}: {told or result['problem']}, full/partial {ratio:.2f}")
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
