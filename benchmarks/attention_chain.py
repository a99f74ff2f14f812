"""Verify attention behind what runs ahead of it in a layer: GEMM, rotation, attention, in a chain.

    python benchmarks/attention_chain.py [--shapes 1x4608,8x32768] [--rows 8,16] [--json FILE]

One CUDA graph holds a layer for every K/V set: Q, K and V of the rows by one GEMM from the output
of the layer before, Q and K rotated in place, attention. "early" lets attention read the plan, page
ids and the first tokens while the rotation still runs (`prefix_ready`), which gives the same bits;
that is checked first. "none" has no attention, so its time is taken off for the ratio. The last two
columns have attention alone, each call behind the one before. Microseconds of a layer, the median
of --replays replays; L2 filled with something else ahead of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from attention_inputs import DEVICE, Bench, Case, Set, cases_of, measured_with

from nwor_specpv.bench.timing import capture, cold_l2, time_graphs

SHAPES = "1x1024,1x4608,4x4608,8x32768,32x4608,32x32768"
WEIGHTS = 4  # in turn, so that none is read from the L2


def find_rotation() -> tuple[str, Callable[..., None]]:
    """vLLM's kernel where it is installed: one launch. Otherwise one of torch's of about that time.

    Both take Q and K as rows of all heads, and change them in place.
    """
    try:
        import vllm._custom_ops as ops
    except ImportError:

        def scale(positions, query, key, head_dim: int, table) -> None:
            query.mul_(0.5)
            key.mul_(0.5)

        return "torch, a product", scale

    def rotate(positions, query, key, head_dim: int, table) -> None:
        ops.rotary_embedding(positions, query, key, head_dim, table, True)

    return "vLLM", rotate


class Chain:
    def __init__(self, case: Case, rotate: Callable[..., None], seed: int) -> None:
        self.bench, self.case, self.rotate = Bench(case, seed), case, rotate
        heads, kv_heads, head_dim = case.heads, case.kv_heads, case.head_dim
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        total = len(case.lens) * case.rows
        width = heads * head_dim
        shape = (WEIGHTS, width, sum(self.sizes))
        self.weights = (torch.randn(shape, device=DEVICE) * 4 * width**-0.5).bfloat16()
        self.first = torch.randn(total, width, device=DEVICE).bfloat16()
        self.packed = torch.empty(total, sum(self.sizes), device=DEVICE, dtype=torch.bfloat16)
        steps = torch.arange(case.rows, device=DEVICE)
        self.positions = torch.cat([n + steps for n in case.lens])
        angles = torch.outer(
            torch.arange(max(case.lens) + case.rows, device=DEVICE),
            10000 ** -torch.linspace(0, 1, head_dim // 2 + 1, device=DEVICE)[:-1],
        )
        self.table = torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
        for s in self.bench.sets:
            query, key, value = (
                part.unflatten(1, (-1, head_dim)) for part in self.packed.split(self.sizes, 1)
            )
            s.query, s.key, s.value = query, key, value

    def layer(self, x: torch.Tensor, index: int) -> None:
        torch.mm(x, self.weights[index % WEIGHTS], out=self.packed)
        query, key, _ = self.packed.split(self.sizes, 1)
        self.rotate(self.positions, query, key, self.case.head_dim, self.table)

    def attend(self, s: Set, *, early: bool) -> torch.Tensor:
        return self.bench.ours(s, False, prefix_ready=early).flatten(1)

    def run(self, *, early: bool | None) -> torch.Tensor:
        """`early`: None for no attention."""
        x = self.first
        for i in range(self.bench.calls):
            self.layer(x, i)
            s = self.bench.sets[i % len(self.bench.sets)]
            x = self.first if early is None else self.attend(s, early=early)
        return x

    def alone(self, *, early: bool) -> None:
        for i in range(self.bench.calls):
            self.attend(self.bench.sets[i % len(self.bench.sets)], early=early)


def measure(case: Case, rotate: Callable[..., None], replays: int, seed: int) -> dict:
    chain = Chain(case, rotate, seed)
    expected = chain.run(early=False).clone()
    if not torch.equal(chain.run(early=True), expected):
        raise AssertionError(f"{case.name}, {case.rows} rows: other bits where it reads early")
    variants: dict[str, Callable[[], object]] = {
        "none": lambda: chain.run(early=None),
        "off": lambda: chain.run(early=False),
        "early": lambda: chain.run(early=True),
        "alone": lambda: chain.alone(early=False),
        "alone early": lambda: chain.alone(early=True),
    }
    graphs = {name: capture(run) for name, run in variants.items()}
    calls = dict.fromkeys(graphs, chain.bench.calls)
    taken = time_graphs(graphs, calls, replays, before=cold_l2())
    us = {name: timing.median_us for name, timing in taken.items()}
    spread = {name: timing.spread_us for name, timing in taken.items()}
    return {"name": case.name, "rows": case.rows, "us": us, "spread_us": spread,
            "ratio": (us["early"] - us["none"]) / (us["off"] - us["none"])}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default="8,16")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("attention_chain: no CUDA device", file=sys.stderr)
        return 1
    name, rotate = find_rotation()
    print(f"device {torch.cuda.get_device_name()} · rotation: {name} · seed={options.seed}")
    columns = ("none", "off", "early", "alone", "alone early")
    print(f"{'B x L':<14}{'rows':>5}" + "".join(f"{c + ' us':>16}" for c in columns) + "   ratio")
    results = []
    for case in cases_of("chain", options.shapes, options.rows):
        one = measure(case, rotate, options.replays, options.seed)
        results.append(one)
        us = "".join(f"{one['us'][c]:>16.2f}" for c in columns)
        print(f"{one['name']:<14}{one['rows']:>5}{us}   {one['ratio']:.3f}", flush=True)
        torch.cuda.empty_cache()
        if options.json:
            environment = measured_with() | {"rotation": name}
            document = {"environment": environment, "results": results}
            options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
