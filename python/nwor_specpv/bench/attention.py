"""`nwor-specpv bench attention`: verify attention against what users have today.

Pages are shuffled, peers get contiguous K/V for free, and all run in turn in one process. Every run
is checked against attention in float64. On CUDA calls run inside a graph over rotating caches. The
read floor is the time torch's own reduction takes to read the same K/V once.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nwor_specpv import verify_attention, verify_plan
from nwor_specpv.cli.parser import Parser, count, counts, heads
from nwor_specpv.ops.attention import last_route

from . import peers
from .report import add_machine_arguments, choose_device, machine, publish
from .timing import Timing, capture, time_calls, time_graphs

PAGE_SIZE = 16
ROTATING_BYTES = 320 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Errors a correct kernel may have: of the output's rounding and of weights in the rows' dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CPU_GOALS = "goal: ours/SDPA at most 0.67 for 1..8 rows, at most 1.0 for 32"


@dataclass(frozen=True)
class Case:
    batch: int
    prefix: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        size = torch.empty((), dtype=self.dtype).element_size()
        return 2 * self.batch * self.prefix * self.kv_heads * self.head_dim * size

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.batch} x {self.prefix}  {self.rows} rows  {self.heads}/{self.kv_heads}  "
            f"D {self.head_dim}  {dtype}"
        )


class Inputs:
    """One step: shuffled pages with a spare page of NaN, and the same K/V contiguous."""

    def __init__(self, case: Case, device: str, seed: int):
        generator = torch.Generator(device=device).manual_seed(seed)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(case.dtype)

        total = case.batch * case.rows
        pages = -(-case.prefix // PAGE_SIZE)
        num_pages = case.batch * pages + 1
        shape = (2, num_pages, PAGE_SIZE, case.kv_heads, case.head_dim)
        self.case = case
        self.cache = noise(*shape)
        order = torch.randperm(num_pages, device=device, generator=generator)
        self.cache[:, order[-1]] = float("nan")
        self.key_cache, self.value_cache = self.cache.unbind()
        self.table = order[:-1].view(case.batch, pages).int()
        self.query = noise(total, case.heads, case.head_dim)
        self.key = noise(total, case.kv_heads, case.head_dim)
        self.value = noise(total, case.kv_heads, case.head_dim)
        ints = {"dtype": torch.int32, "device": device}
        self.lens = torch.full((case.batch,), case.prefix, **ints)
        self.starts = torch.arange(0, total + 1, case.rows, **ints)
        # Heap order: row j hangs below row (j - 1) / 2.
        sees = torch.zeros(case.rows, case.rows, dtype=torch.bool)
        for row in range(case.rows):
            sees[row, row] = True
            if row:
                sees[row] |= sees[(row - 1) // 2]
        self.visible = {
            "chain": torch.ones(case.rows, case.rows, dtype=torch.bool).tril(),
            "tree": sees,
        }
        bits = [sum(1 << j for j in range(case.rows) if sees[i, j]) for i in range(case.rows)]
        words = -(-case.rows // 64)
        mask = [[_signed(b >> (64 * w)) for w in range(words)] for b in bits]
        self.tree_mask = torch.tensor(mask, device=device).repeat(case.batch, 1)
        self.scale = case.head_dim**-0.5
        self.out = torch.full_like(self.query, float("nan"))

    def attend(self, mask: str, plan: torch.Tensor | None = None) -> torch.Tensor:
        return verify_attention(
            self.query,
            self.key,
            self.value,
            self.key_cache,
            self.value_cache,
            self.table,
            self.lens,
            self.starts,
            self.tree_mask if mask == "tree" else None,
            self.scale,
            out=self.out,
            max_rows=self.case.rows,
            plan=plan,
        )

    def plan(self, mask: str) -> torch.Tensor:
        return verify_plan(
            self.query,
            self.key_cache,
            self.table,
            self.lens,
            self.starts,
            self.tree_mask if mask == "tree" else None,
            max_rows=self.case.rows,
        )

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [B, H, R, D] and contiguous K, V [B, Hkv, L + R, D]: what SDPA is given."""
        case = self.case
        by_request = (case.batch, case.rows, -1, case.head_dim)
        query = self.query.view(by_request).transpose(1, 2).contiguous()
        both = []
        for side, rows in ((0, self.key), (1, self.value)):
            prefix = self.cache[side][self.table.long()].flatten(1, 2)[:, : case.prefix]
            joined = torch.cat([prefix, rows.view(by_request)], dim=1)
            both.append(joined.transpose(1, 2).contiguous())
        return query, both[0], both[1]

    def bool_mask(self, mask: str) -> torch.Tensor:
        full = torch.ones(self.case.rows, self.case.prefix, dtype=torch.bool)
        return torch.cat([full, self.visible[mask]], dim=1).to(self.query.device)

    def expected(self, mask: str) -> torch.Tensor:
        """Attention in float64, one KV head after the other."""
        query, key, value = self.dense()
        group = self.case.heads // self.case.kv_heads
        hidden = ~self.bool_mask(mask)
        parts = []
        for head in range(self.case.kv_heads):
            own = query[:, head * group : (head + 1) * group].double()
            logits = own @ key[:, head, None].double().transpose(-1, -2) * self.scale
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(weights @ value[:, head, None].double())
        return torch.cat(parts, dim=1).transpose(1, 2).flatten(0, 1)


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def sdpa(inputs: Inputs, mask: str) -> Callable[[], torch.Tensor]:
    query, key, value = inputs.dense()
    visible = inputs.bool_mask(mask)
    return lambda: scaled_dot_product_attention(
        query, key, value, attn_mask=visible, enable_gqa=True, scale=inputs.scale
    )


def torch_flash_folded(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """LibTorch's FlashAttention-2 over the prefix alone, rows folded into the head group."""
    case = inputs.case
    _, key, value = inputs.dense()
    group = case.heads // case.kv_heads
    query = inputs.query.view(case.batch, case.rows, case.kv_heads, group, case.head_dim)
    query = query.transpose(2, 3).flatten(1, 2).contiguous()
    keys, values = (t[:, :, : case.prefix].transpose(1, 2).contiguous() for t in (key, value))
    tokens = case.rows * group
    return lambda: torch.ops.aten._flash_attention_forward(
        query, keys, values, None, None, tokens, case.prefix, 0.0, False, False, scale=inputs.scale
    )[0]


def read_floor(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """A sum of floats: of torch's reductions the one that comes closest to the memory's speed."""
    words = inputs.cache.view(torch.float32).flatten()
    return lambda: words.sum()


def bench_cpu(case: Case, masks: Sequence[str], replays: int) -> list[dict[str, Any]]:
    inputs = Inputs(case, "cpu", seed=0)
    results = []
    for mask in masks:
        variants = {
            "ours": lambda mask=mask: inputs.attend(mask),
            "SDPA": sdpa(inputs, mask),
            "read": read_floor(inputs),
        }
        timings = time_calls(variants, replays)
        exact = {"SDPA": _rows(variants["SDPA"]())}
        results.append(_result(inputs, mask, timings, variants["ours"], exact))
    return results


def bench_cuda(
    case: Case, masks: Sequence[str], replays: int, flash: peers.Peer
) -> list[dict[str, Any]]:
    """Graphs of enough calls that their caches exceed the L2 many times over."""
    count = max(2, -(-ROTATING_BYTES // max(1, case.kv_bytes)))
    sets = [Inputs(case, "cuda", seed) for seed in range(min(count, 24))]
    results = []
    for mask in masks:
        plan = sets[0].plan(mask)
        variants: dict[str, list[Callable[[], Any]]] = {
            "ours": [lambda i=i, mask=mask, plan=plan: i.attend(mask, plan) for i in sets],
            "torch flash folded, prefix only": [torch_flash_folded(i) for i in sets],
            "read": [read_floor(i) for i in sets],
        }
        if case.batch * case.prefix <= 1 << 18:
            variants["SDPA"] = [sdpa(i, mask) for i in sets]
        if flash.call is not None and mask == "chain":
            variants[flash.name] = [lambda i=i: flash.call(i) for i in sets]
        graphs = {
            name: capture(lambda c=calls: [f() for f in c]) for name, calls in variants.items()
        }
        timings = time_graphs(graphs, {name: len(sets) for name in variants}, replays)
        exact = {n: _rows(variants[n][0]()) for n in ("SDPA",) if n in variants}
        results.append(_result(sets[0], mask, timings, variants["ours"][0], exact))
    return results


def _rows(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)


def _result(
    inputs: Inputs,
    mask: str,
    timings: dict[str, Timing],
    timed: Callable[[], Any],
    peers_out: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """One line of the table; raises if what the timed call leaves is wrong."""
    case, expected = inputs.case, inputs.expected(mask)
    inputs.out.fill_(float("nan"))
    timed()
    errors = {"ours": (inputs.out.double() - expected).abs().max().item()}
    errors |= {
        name: (out.double() - expected).abs().max().item() for name, out in peers_out.items()
    }
    if not errors["ours"] <= TOLERANCE[case.dtype]:
        raise AssertionError(f"{case} {mask}: error {errors['ours']}")
    ours = timings["ours"].median_us
    return {
        "case": str(case),
        "mask": mask,
        "rows": case.rows,
        "kv_bytes": case.kv_bytes,
        "route": last_route(),
        "us": {name: timing.median_us for name, timing in timings.items()},
        "spread_us": {name: timing.spread_us for name, timing in timings.items()},
        "ratio": {
            name: ours / timing.median_us
            for name, timing in timings.items()
            if name not in ("ours", "read")
        },
        "percent_of_read_floor": 100.0 * timings["read"].median_us / ours,
        "max_error": errors,
    }


def describe(report: dict[str, Any]) -> str:
    lines = [
        f"device {report['device']} · torch {report['torch']} · commit {report['revision']} · "
        f"page {PAGE_SIZE} shuffled · median of {report['replays']}, spread in brackets",
        f"{'':44}{'ours us':>20}  {'peers (ours / peer)':<44}{'of read floor':>14}  max error",
    ]
    for result in report["results"]:
        us, spread = result["us"], result["spread_us"]
        ours = f"{us['ours']:.1f} [{spread['ours']:.1f}]"
        others = ", ".join(f"{n} {us[n]:.1f} ({r:.2f})" for n, r in result["ratio"].items())
        errors = ", ".join(f"{n} {e:.1e}" for n, e in result["max_error"].items())
        floor = f"{result['percent_of_read_floor']:.0f} %"
        name = f"{result['case']}  {result['mask']}"
        lines.append(f"{name:<44}{ours:>20}  {others:<44}{floor:>14}  {errors}")
    lines += [f"missing: {name}" for name in report["missing"]]
    if report["goal"]:
        lines.append(report["goal"])
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(prog="nwor-specpv bench attention", description=__doc__)
    parser.add_argument("--rows", type=counts, help="rows per request, comma-separated")
    parser.add_argument("--batch", type=counts, help="requests")
    parser.add_argument("--prefix", type=counts, help="tokens before the rows")
    parser.add_argument(
        "--heads", nargs="+", type=heads, metavar="Hq/Hkv", help="query and KV heads"
    )
    parser.add_argument("--head-dim", type=counts, help="channels of a head, comma-separated")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), help="of rows and cache")
    parser.add_argument(
        "--mask",
        nargs="+",
        choices=["chain", "tree"],
        default=["tree"],
        help="among the rows, default: tree",
    )
    parser.add_argument("--replays", type=count, help="default: 20 on CUDA, 9 on the CPU")
    return parser


def _cases(arguments: argparse.Namespace, device: str) -> list[Case]:
    cpu = device == "cpu"
    dtypes = arguments.dtype or (["float32", "bfloat16"] if cpu else ["bfloat16"])
    pairs = arguments.heads or ([(32, 8), (9, 3)] if cpu else [(32, 8)])
    grid = itertools.product(
        dtypes,
        pairs,
        arguments.head_dim or ([64, 128] if cpu else [128]),
        arguments.batch or ([1] if cpu else [1, 8, 32]),
        arguments.prefix or ([4096, 32768] if cpu else [4608, 32768]),
        arguments.rows or ([1, 2, 4, 8, 32] if cpu else [8, 64]),
    )
    return [
        Case(batch, prefix, rows, *pair, dim, DTYPES[dtype])
        for dtype, pair, dim, batch, prefix, rows in grid
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    add_machine_arguments(parser)
    arguments = parser.parse_args(argv)
    device = choose_device(arguments)
    replays = arguments.replays or (20 if device == "cuda" else 9)
    results, missing = [], []
    if device == "cuda":
        flash = peers.vllm_flash_attention()
        if flash.call is None:
            missing.append(f"{flash.name} ({flash.missing})")
        for case in _cases(arguments, device):
            results += bench_cuda(case, arguments.mask, replays, flash)
    else:
        missing.append(f"{peers.VLLM_FLASH_NAME} (runs on CUDA only)")
        for case in _cases(arguments, device):
            results += bench_cpu(case, arguments.mask, replays)
    report = {
        **machine(device),
        "replays": replays,
        "results": results,
        "missing": missing,
        "goal": CPU_GOALS if device == "cpu" else "",
    }
    return publish(report, describe, arguments.json)
