"""Whole steps of the transformers host, full and partial, over long made-up contexts.

    python benchmarks/generate_gpu.py --json FILE     # on a GPU, shapes of two models

Weights are random and the context's K/V too: what is measured is time, with an acceptance that is
set. A step is everything from the batch's tensors to the commit: lists, copies, a captured pass,
the argmax read back, the commit and its receipt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from nwor_specpv import NworConfig, SpecPVConfig, VerifyPolicy
from nwor_specpv.bench.report import machine
from nwor_specpv.cli.parser import counts
from nwor_specpv.transformers.request import Part, Request
from nwor_specpv.transformers.round import Round
from nwor_specpv.transformers.runner import ModelRunner
from nwor_specpv.transformers.views.views import Views

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
SMOLLM2 = LLAMA_8B | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
TINY = LLAMA_8B | {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {"llama-3.1-8b": LLAMA_8B, "smollm2-135m": SMOLLM2, "tiny": TINY}
_ROOM = 1024  # tokens that the measured steps add
GOAL = 1.8  # times as fast as a full step, at 8 x 32768


class Steps:
    """A batch of requests that grows by what is accepted."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, rows: int, accepted: int):
        self._runner, self._rows, self._accepted = runner, rows, accepted
        self.chosen: list[list[int]] = []  # what the last step's rows would go on with
        if runner.reserve(batch * (context + _ROOM), batch * rows):
            for side in (runner.cache.keys, runner.cache.values):
                for layer in side:
                    layer.normal_()
        self._requests = []
        for index in range(batch):
            request = Request(runner.new_key(), index, [0] * (context + 1), context, 1, 0, 0)
            runner.cache.allocator.extend(request.key, context)
            request.cached = context
            self._requests.append(request)

    def end(self) -> None:
        for request in self._requests:
            request.partial = None
            self._runner.cache.allocator.free(request.key)

    def run(self, views: Views | None, policy: VerifyPolicy | None) -> str:
        """One step of all requests; what kind it was. Lossless: every tail is confirmed."""
        parts = [
            Part(r, [], [0] * self._rows, [*range(-1, self._rows - 1)], r.cached)
            for r in self._requests
        ]
        kind, lossless = "full", False
        if views is not None:
            lossless = views.config.specpv_mode == "lossless"
            for part in parts:
                request = part.request
                decision = policy.decide(request.partial, self._rows)
                part.decision, part.prefix_len = decision, decision.prefix_len
                part.fed = request.tokens[decision.prefix_len : decision.committed_len]
                part.want_fed_logits = lossless
                kind = decision.kind
            keys = [request.key for request in self._requests]
            batch = [(part.request.partial, part.decision) for part in parts]
            views.begin(batch, self._runner.cache.block_table(keys))
        round_ = Round(self._runner, parts)
        round_.run(views, len(parts))
        self.chosen = round_.tree_logits().argmax(-1).tolist()
        round_.commit([[*range(1, self._accepted + 1)]] * len(parts))
        for part in parts:
            part.request.tokens += [0] * (self._accepted + 1)
            part.request.cached = len(part.request.tokens) - 1
            if views is not None:
                confirmed = len(part.fed) if lossless else 0
                part.request.partial.finish(part.decision, confirmed + self._accepted)
        return kind

    def open_views(self, config: SpecPVConfig, context: int) -> Views:
        views = self._runner.open_views(config, len(self._requests), context + _ROOM, self._rows)
        for request in self._requests:
            request.partial = views.store.open(context)
            request.partial.prefill(request.cached)
        return views


def partial_steps(kinds: list[str]) -> float | None:
    """Between two refreshes, on average; None where there were no two."""
    refreshes = [i for i, kind in enumerate(kinds) if kind == "full_refresh"]
    if len(refreshes) < 2:
        return None
    return (refreshes[-1] - refreshes[0]) / (len(refreshes) - 1) - 1


def measure(runner: ModelRunner, batch: int, context: int, arguments: Any) -> dict[str, Any]:
    config = SpecPVConfig(enable_specpv=True, specpv_mode=arguments.mode)
    if arguments.view_blocks:
        config.specpv_n_retrieval_blocks = arguments.view_blocks
    steps = Steps(runner, batch, context, arguments.rows, arguments.accepted)
    graphs = runner.cache.graphs
    taken: dict[str, list[float]] = {"full": [], "partial": [], "full_refresh": []}
    before = graphs.replays if graphs else 0
    kinds: list[str] = []

    def run(count: int, views: Views | None, policy: VerifyPolicy | None) -> None:
        for _ in range(count):
            runner.synchronize()
            started = time.perf_counter()
            kind = steps.run(views, policy)
            runner.synchronize()
            taken[kind].append(time.perf_counter() - started)
            kinds.append(kind)

    with runner.installed():
        run(arguments.steps, None, None)
        views = steps.open_views(config, context)
        run(3 * arguments.steps, views, VerifyPolicy(config))
    steps.end()
    if graphs:
        graphs.drop(views)
    # The first step of a kind runs without a graph and the second captures one.
    ms = {kind: 1000 * statistics.median(times[2:]) for kind, times in taken.items() if times[2:]}
    result = {
        "batch": batch,
        "context": context,
        "view_tokens": views.store.budget.static_tokens,
        "ms": ms,
        "steps": {kind: len(times) for kind, times in taken.items()},
        "replays": graphs.replays - before if graphs else 0,
        "problem": graphs.problem if graphs else None,
    }
    # A view's life: partial steps until the tail is full, then one full step with its rows.
    partial = partial_steps(kinds)
    if len(ms) == len(taken) and partial is not None:
        mean = (partial * ms["partial"] + ms["full_refresh"]) / (partial + 1)
        result |= {
            "partial_steps_per_refresh": partial,
            "full / partial": ms["full"] / ms["partial"],
            "full / mean with refreshes": ms["full"] / mean,
        }
    return result


def load(name: str, device: str) -> ModelRunner:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[name]), dtype=dtype).eval()
    return ModelRunner(model, NworConfig(), graphs=device == "cuda")


def describe(result: dict[str, Any]) -> str:
    times = result.get("ms", {})
    told = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in times.items())
    text = f"{result['batch']} x {result['context']}: {told or result['problem']}"
    if "full / partial" in result:
        text += f", full/partial {result['full / partial']:.2f}"
        text += f", with refreshes {result['full / mean with refreshes']:.2f}"
    return f"{text}, {result.get('replays', 0)} replays"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="smollm2-135m,llama-3.1-8b")
    parser.add_argument("--contexts", type=counts, default=[8192, 32768, 131072])
    parser.add_argument("--batches", type=counts, default=[1, 8])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--accepted", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mode", default="rectify", choices=["rectify", "refresh"])
    parser.add_argument("--view-blocks", type=int, help="retrieved blocks, default: 256")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    for name in names:
        if name not in MODELS:
            parser.error(f"--models: got {name!r}, expected some of {', '.join(MODELS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = {name: getattr(arguments, name) for name in ("mode", "rows", "accepted")}
    report = machine(device) | told | {"goal at 8 x 32768": GOAL, "models": {}}
    for name in names:
        results = report["models"][name] = []
        runner = None  # the last model's memory first
        runner = load(name, device)
        for context in arguments.contexts:
            for batch in arguments.batches:
                try:
                    result = measure(runner, batch, context, arguments)
                except torch.OutOfMemoryError:
                    result = {"batch": batch, "context": context, "problem": "not enough memory"}
                results.append(result)
                print(f"{name} {describe(result)}", flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
