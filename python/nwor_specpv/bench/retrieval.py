"""`nwor-specpv bench retrieval`: block summaries and refresh against their torch formulation.

One request, one layer. A refresh of ours scores all candidates and writes the chosen blocks as a
view into the paged cache. The torch formulation is einsum, topk and take_along_dim: it copies the
chosen tokens' K and V, because ordinary attention cannot read them where they lie. Both get the
same summaries; each run is checked in float64. On CUDA calls run inside a graph over rotating data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwor_specpv.cli.parser import Parser, count, counts, heads
from nwor_specpv.ops.retrieval import block_summaries, select_blocks

from .partial_step import (
    BLOCK,
    BUDGET,
    PAGE,
    SINK,
    WINDOW,
    Shape,
    bench_commit,
    bench_step,
    build_views,
)
from .report import add_machine_arguments, choose_device, machine, publish
from .timing import Timing, capture, time_calls, time_graphs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROTATING_BYTES = 300 << 20
GOALS = {
    ("cuda", "refresh"): "goal at 131072 tokens: at most 25 us",
    ("cuda", "summaries"): "goal at 131072 tokens: at most 80 us",
    ("cpu", "refresh"): "goal at 32768 tokens, D 64: at least 10 x the torch formulation",
}


@dataclass(frozen=True)
class Case:
    tokens: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    score: str

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        shape = f"{self.heads}/{self.kv_heads} heads, D {self.dim}, {name}"
        return f"{self.tokens} tokens, {self.rows} rows, {shape}, {self.score}"

    @property
    def candidates(self) -> int:
        return self.tokens // BLOCK - WINDOW - SINK

    @property
    def key_bytes(self) -> int:
        return self.tokens * self.kv_heads * self.dim * self.dtype.itemsize


class Inputs:
    """One layer's cache in shuffled pages, and the same K and V contiguous for the peer."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(case.dtype)

        self.case = case
        pages = case.tokens // PAGE
        order = torch.randperm(pages, generator=generator, device=device)
        self.table = order.int()[None].contiguous()
        self.key_cache = random(pages, PAGE, case.kv_heads, case.dim)
        self.query = random(1, case.rows, case.heads, case.dim)
        blocks = case.candidates
        self.kmax = torch.empty(1, blocks, case.kv_heads, case.dim, dtype=case.dtype, device=device)
        self.kmin = torch.empty_like(self.kmax)

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.start, self.end = ints(SINK * BLOCK), ints((SINK + blocks) * BLOCK)
        self.count, self.partial, self.length = ints(blocks), ints(1), ints(case.tokens)
        self.k = min(BUDGET, blocks)
        self.ids = torch.empty(1, case.kv_heads, self.k, dtype=torch.int32, device=device)
        self.scores = torch.empty(case.kv_heads * blocks, device=device)
        self.blocks = torch.empty(
            1, 1, case.kv_heads, SINK + self.k + WINDOW + 2, dtype=torch.int32, device=device
        )
        self.num_blocks, self.view_lens = ints(0), ints(0)
        self.summarize()

    def contiguous_kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[Hkv, candidates, BLOCK * D] in token order, as a contiguous cache holds it."""
        case = self.case
        keys = self.key_cache[self.table[0].long()].flatten(0, 1)
        keys = keys[SINK * BLOCK :][: case.candidates * BLOCK].transpose(0, 1)
        keys = keys.reshape(case.kv_heads, case.candidates, BLOCK * case.dim).contiguous()
        return keys, keys.clone()

    def summarize(self) -> None:
        block_summaries(
            self.key_cache, self.table, self.start, self.end, self.kmax, self.kmin, BLOCK
        )

    def refresh(self) -> None:
        select_blocks(
            self.query,
            self.kmax,
            self.kmin,
            self.count,
            self.k,
            self.case.score,
            out=self.ids,
            scores=self.scores,
        )
        lists = self.ids[None], self.table, self.length, self.partial
        build_views(*lists, self.blocks, self.num_blocks, self.view_lens)


def score_blocks(
    query: torch.Tensor, kmax: torch.Tensor, kmin: torch.Tensor, quest: bool
) -> torch.Tensor:
    if quest:
        rows = torch.einsum("qhgd,nhd->hgqn", query.clamp(min=0), kmax)
        rows = rows + torch.einsum("qhgd,nhd->hgqn", query.clamp(max=0), kmin)
    else:
        upper = torch.einsum("qhgd,nhd->hgqn", query, kmax)
        rows = torch.maximum(upper, torch.einsum("qhgd,nhd->hgqn", query, kmin))
    return rows.mean(2).mean(1)


def choose_and_copy(
    query: torch.Tensor,
    kmax: torch.Tensor,
    kmin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k: int,
    quest: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch formulation; what torch.compile gets too."""
    scores = score_blocks(query, kmax, kmin, quest)
    chosen = scores.topk(k, dim=-1).indices.sort(-1).values
    index = chosen[..., None].expand(-1, -1, keys.shape[-1])
    return torch.take_along_dim(keys, index, 1), torch.take_along_dim(values, index, 1)


def torch_refresh(inputs: Inputs, formulation: Callable = choose_and_copy) -> Callable[[], Any]:
    case = inputs.case
    group = case.heads // case.kv_heads
    keys, values = inputs.contiguous_kv()
    query = inputs.query[0].reshape(case.rows, case.kv_heads, group, case.dim)
    given = query, inputs.kmax[0], inputs.kmin[0], keys, values, inputs.k, case.score == "quest"
    return lambda: formulation(*given)


def extremes(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.amax(2), keys.amin(2)


def torch_summaries(inputs: Inputs, formulation: Callable = extremes) -> Callable[[], Any]:
    case = inputs.case
    keys = inputs.contiguous_kv()[0].reshape(case.kv_heads, case.candidates, BLOCK, case.dim)
    return lambda: formulation(keys)


def check(inputs: Inputs) -> float:
    """How far a block left out scores above one taken, in float64; raises beyond rounding."""
    case = inputs.case
    inputs.summarize()
    inputs.ids.fill_(-7)
    inputs.refresh()
    viewed = SINK + inputs.k + WINDOW
    view = int(inputs.num_blocks), int(inputs.view_lens)
    if view != (viewed, viewed * BLOCK):
        raise AssertionError(f"{case}: a view of {view} blocks and tokens, not of {viewed} blocks")
    keys = inputs.contiguous_kv()[0].reshape(case.kv_heads, case.candidates, BLOCK, case.dim)
    kmax, kmin = (side.transpose(0, 1) for side in extremes(keys))
    if not (torch.equal(inputs.kmax[0], kmax) and torch.equal(inputs.kmin[0], kmin)):
        raise AssertionError(f"{case}: summaries differ")
    group = case.heads // case.kv_heads
    query = inputs.query[0].double().reshape(case.rows, case.kv_heads, group, case.dim)
    scores = score_blocks(query, kmax.double(), kmin.double(), case.score == "quest")
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, inputs.ids[0].long(), True)
    if int(taken.sum()) != case.kv_heads * inputs.k:
        raise AssertionError(f"{case}: ids repeat")
    least = scores.masked_fill(~taken, float("inf")).amin(1)
    most = scores.masked_fill(taken, -float("inf")).amax(1)
    error = float((most - least).clamp(min=0).max()) if inputs.k < case.candidates else 0.0
    if error > 1e-2:
        raise AssertionError(f"{case}: a block left out scores {error} more than one taken")
    return error


def bench(case: Case, device: str, replays: int, compiled: bool = False) -> list[dict[str, Any]]:
    error = check(Inputs(case, device, 0))
    sets = 1
    if device == "cuda":
        sets = min(12, max(2, -(-ROTATING_BYTES // max(1, case.key_bytes // BLOCK * 2))))
    inputs = [Inputs(case, device, seed) for seed in range(sets)]
    results = []
    for what, ours, peer, formulation in (
        ("refresh", Inputs.refresh, torch_refresh, choose_and_copy),
        ("summaries", Inputs.summarize, torch_summaries, extremes),
    ):
        variants: dict[str, list[Callable[[], Any]]] = {
            "ours": [lambda i=i, run=ours: run(i) for i in inputs],
            "torch": [peer(i) for i in inputs],
        }
        if compiled:
            faster = torch.compile(formulation, dynamic=False)
            variants["compiled"] = [peer(i, faster) for i in inputs]
        timings = _time(variants, device, replays)
        us = {name: timing.median_us for name, timing in timings.items()}
        results.append(
            {
                "what": what,
                "case": str(case),
                "tokens": case.tokens,
                "us": us,
                "spread_us": {name: timing.spread_us for name, timing in timings.items()},
                "speedup": us["torch"] / us["ours"],
                **({"speedup_compiled": us["compiled"] / us["ours"]} if compiled else {}),
                "gigabytes_per_second": case.key_bytes
                / (1 if what == "summaries" else BLOCK / 2)
                / us["ours"]
                / 1e3,
                "score_error": error,
                "goal": GOALS.get((device, what), ""),
            }
        )
    return results


def _time(
    variants: dict[str, list[Callable[[], Any]]], device: str, replays: int
) -> dict[str, Timing]:
    if device == "cuda":
        graphs = {name: capture(lambda c=c: [f() for f in c]) for name, c in variants.items()}
        return time_graphs(graphs, {name: len(c) for name, c in variants.items()}, replays)
    return time_calls({name: calls[0] for name, calls in variants.items()}, replays)


def describe(report: dict[str, Any]) -> str:
    lines = [
        f"device {report['device']} · torch {report['torch']} · commit {report['revision']} · "
        f"blocks of {BLOCK}, budget {BUDGET}, one request and layer · "
        f"median of {report['replays']}, spread in brackets",
        f"{'':12}{'':58}{'ours us':>20}{'torch us':>20}{'torch / ours':>14}{'GB/s':>8}",
    ]
    for result in report["results"]:
        if result["what"] in ("step", "commit"):
            figures = ", ".join(f"{name} {us:.1f} us" for name, us in result["us"].items())
            ratio = f" · full / partial {result['speedup']:.1f}" if "speedup" in result else ""
            lines.append(f"{result['what']:<12}{result['case']}: {figures}{ratio}")
            continue
        us, spread = result["us"], result["spread_us"]
        ours, peer = (f"{us[n]:.1f} [{spread[n]:.1f}]" for n in ("ours", "torch"))
        lines.append(
            f"{result['what']:<12}{result['case']:<58}{ours:>20}{peer:>20}"
            f"{result['speedup']:>14.1f}{result['gigabytes_per_second']:>8.0f}"
            + (f"   compiled {us['compiled']:.1f}" if "compiled" in us else "")
        )
    lines += sorted({result["goal"] for result in report["results"] if result["goal"]})
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser(prog="nwor-specpv bench retrieval", description=__doc__)
    parser.add_argument("--tokens", type=counts, help="context lengths, comma-separated")
    parser.add_argument("--rows", type=counts, default=[8], help="rows of the tree")
    parser.add_argument(
        "--heads",
        type=heads,
        default=(32, 8),
        metavar="Hq/Hkv",
        help="query and KV heads, default: 32/8",
    )
    parser.add_argument("--head-dim", type=count, help="channels of a head")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of rows and cache")
    parser.add_argument(
        "--score",
        nargs="+",
        choices=["specpv", "quest"],
        default=["specpv"],
        help="how blocks are scored, default: specpv",
    )
    parser.add_argument("--replays", type=count, help="default: 20 on CUDA, 9 on the CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile'd peers as well")
    parser.add_argument("--steps", type=counts, help="contexts of whole steps, see partial_step.py")
    parser.add_argument("--commits", type=counts, help="requests of commits that serve views")
    parser.add_argument("--layers", type=count, default=32, help="of steps and commits")
    add_machine_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    least = (SINK + WINDOW + 1) * BLOCK
    for name in ("tokens", "steps"):
        few = [tokens for tokens in getattr(arguments, name) or [] if tokens < least]
        if few:
            parser.error(f"--{name}: got {few[0]}, expected {least} or more: sink, window, a block")
        broken = [tokens for tokens in getattr(arguments, name) or [] if tokens % PAGE]
        if broken:
            parser.error(f"--{name}: got {broken[0]}, expected a multiple of {PAGE}: whole pages")
    device = choose_device(arguments)
    cpu = device == "cpu"
    replays = arguments.replays or (9 if cpu else 20)
    dtype = DTYPES[arguments.dtype or ("float32" if cpu else "bfloat16")]
    num_heads, kv_heads = arguments.heads
    dim = arguments.head_dim or (64 if cpu else 128)
    results = []
    for tokens in arguments.tokens or ([8192, 32768] if cpu else [32768, 131072]):
        for rows in arguments.rows:
            for score in arguments.score:
                case = Case(tokens, rows, num_heads, kv_heads, dim, dtype, score)
                results += bench(case, device, replays, arguments.compile)
    shape = {"heads": num_heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype, "device": device}
    shape["layers"] = arguments.layers
    for tokens in arguments.steps or []:
        results.append(bench_step(Shape(8, tokens, **shape), replays))
    for requests in arguments.commits or []:
        results.append(bench_commit(Shape(requests, 0, **shape), replays))
    report = {**machine(device), "replays": replays, "results": results}
    return publish(report, describe, arguments.json)
