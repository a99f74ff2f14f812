"""Verify attention on a CUDA device against its peers: the shapes of speculative verification.

    python benchmarks/attention_gpu.py [--sections k1,odd,ragged,view,fp8,rows64] [--json FILE]

Protocol: K/V sets of at least 300 MB in turn, shuffled pages of 16 tokens, all calls of a variant
in one CUDA graph, variants alternating, the median of --replays replays with the range of the
middle 80 % in brackets. Every row is checked against float64 in the same run. A peer that is
not there is named, with the reason. Peers compute a chain: they have no tree mask.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import nwor_specpv
from nwor_specpv import _stamp
from nwor_specpv.attention import last_route
from nwor_specpv.bench.timing import Timing, capture, time_graphs

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SET_BYTES = 300_000_000
DEVICE = "cuda"

GOALS_US = {
    (1, 4608): 10.0,
    (8, 4608): 40.0,
    (32, 4608): 140.0,
    (1, 32768): 37.0,
    (8, 32768): 244.0,
    (32, 32768): 960.0,
    (1, 131072): 127.0,
}


@dataclass(frozen=True)
class Case:
    section: str
    lens: tuple[int, ...]
    rows: int
    cache: str = "bfloat16"
    view: bool = False  # per-head block lists over all pages, each head in an order of its own
    goal_us: float | None = None

    @property
    def name(self) -> str:
        kinds = sorted(set(self.lens), reverse=True)
        return " + ".join(f"{self.lens.count(n)} x {n}" for n in kinds)

    @property
    def tokens(self) -> int:
        return sum(self.lens)


def cases(sections: Sequence[str]) -> list[Case]:
    found: list[Case] = []
    if "k1" in sections:
        for (batch, length), goal in GOALS_US.items():
            for rows in (1, 4, 8, 16):
                found.append(Case("k1", (length,) * batch, rows, goal_us=goal))
    if "odd" in sections:
        for batch in (4, 5, 6, 7, 9, 10, 13, 17, 20, 27, 33, 40):
            goal = batch * 32768 * 4096 / 4.1e6
            found.append(Case("odd", (32768,) * batch, 8, goal_us=goal))
    if "ragged" in sections:
        lens = (32768,) * 4 + (2048,) * 28
        found.append(Case("ragged", lens, 8, goal_us=sum(lens) * 4096 / 4.0e6))
    if "view" in sections:
        for batch, goal in ((1, 10.0), (8, 40.0), (32, 140.0)):
            found.append(Case("view", (4608,) * batch, 8, view=True, goal_us=goal))
    if "fp8" in sections:
        for rows in (1, 8, 16):
            found.append(Case("fp8", (32768,) * 8, rows))
            found.append(Case("fp8", (32768,) * 8, rows, cache="float8_e4m3fn"))
    if "rows64" in sections:
        for (batch, length), goal in (
            ((1, 4608), 22.3),
            ((1, 32768), 68.0),
            ((8, 32768), 444.0),
            ((1, 131072), 229.0),
        ):
            found.append(Case("rows64", (length,) * batch, 64, goal_us=goal))
    return found


def random_tree(rows: int, rng: random.Random) -> list[int]:
    """Row r's visible rows as a bit mask: itself and its ancestors; parents come first."""
    masks: list[int] = []
    for row in range(rows):
        seen = masks[rng.randrange(row)] if row else 0
        masks.append(seen | 1 << row)
    return masks


class Pool:
    """One cache that all K/V sets of a case take their pages from."""

    def __init__(self, dtype: torch.dtype, num_pages: int) -> None:
        shape = (num_pages, PAGE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(2))
        step = 1 << 14
        for cache in (self.keys, self.values):
            for first in range(0, num_pages, step):
                part = cache[first : first + step]
                part.copy_(torch.randn(part.shape, device=DEVICE, dtype=torch.bfloat16))

    # Indexing goes by bytes or 16-bit words: not every index kernel knows float8.
    @staticmethod
    def put(
        cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, rows: torch.Tensor
    ) -> None:
        word = torch.uint8 if cache.itemsize == 1 else torch.int16
        cache.view(word)[page, slot] = rows.to(cache.dtype).view(word)

    @staticmethod
    def take(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        word = torch.uint8 if cache.itemsize == 1 else torch.int16
        return cache.view(word)[page, slot].view(cache.dtype).float().double()


@dataclass(eq=False)  # sets are told apart by identity
class Set:
    """Tensors of one call; the rows' K/V also lie in the cache behind the prefix, for the peers."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    pages: torch.Tensor  # of the prefix, all requests
    out: torch.Tensor
    view: nwor_specpv.PartialView | None


class Bench:
    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        rng = random.Random(seed)
        torch.manual_seed(seed)
        dtype = getattr(torch, case.cache)
        batch, rows = len(case.lens), case.rows
        prefix_pages = [math.ceil(n / PAGE) for n in case.lens]
        pages = [math.ceil((n + rows) / PAGE) for n in case.lens]
        token_bytes = 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
        self.bytes = case.tokens * token_bytes
        num_sets = max(1, math.ceil(SET_BYTES / self.bytes))
        self.pool = Pool(dtype, num_sets * sum(pages))
        order = torch.randperm(num_sets * sum(pages), dtype=torch.int32)
        self.lens = torch.tensor(case.lens, dtype=torch.int32, device=DEVICE)
        self.all_lens = self.lens + rows
        self.starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=DEVICE)
        words = math.ceil(rows / 64)
        bits = [m for _ in case.lens for m in random_tree(rows, rng)]
        split = [[(m >> 64 * w) & (1 << 64) - 1 for w in range(words)] for m in bits]
        signed = [[v - (1 << 64) if v >> 63 else v for v in row] for row in split]
        self.tree = torch.tensor(signed, dtype=torch.int64, device=DEVICE)
        self.sets = []
        at = 0
        for _ in range(num_sets):
            table = torch.zeros(batch, max(pages), dtype=torch.int32)
            used = []
            for b in range(batch):
                table[b, : pages[b]] = order[at : at + pages[b]]
                used.append(table[b, : prefix_pages[b]])
                at += pages[b]
            self.sets.append(self._make_set(table.to(DEVICE), torch.cat(used).to(DEVICE)))
        first = self.sets[0]
        common = (first.query, self.pool.keys, first.table, self.lens, self.starts)
        self.plans = {
            tree: nwor_specpv.verify_plan(
                *common, self.tree if tree else None, view=first.view, max_rows=rows
            )
            for tree in (False, True)
        }
        self.calls = max(num_sets, 8 if self.bytes < SET_BYTES else 1)

    def _make_set(self, table: torch.Tensor, used: torch.Tensor) -> Set:
        case = self.case
        total = len(case.lens) * case.rows

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(total, heads, HEAD_DIM, device=DEVICE).bfloat16()

        query, key, value = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
        for b, length in enumerate(case.lens):
            rows = slice(b * case.rows, (b + 1) * case.rows)
            at = torch.arange(length, length + case.rows, device=DEVICE)
            page = table[b, at // PAGE].long()
            self.pool.put(self.pool.keys, page, at % PAGE, key[rows])
            self.pool.put(self.pool.values, page, at % PAGE, value[rows])
        view = None
        if case.view:
            blocks = case.lens[0] // PAGE
            lists = [
                torch.stack([t[torch.randperm(blocks, device=DEVICE)] for _ in range(KV_HEADS)])
                for t in table[:, :blocks]
            ]
            counts = torch.full((len(case.lens),), blocks, dtype=torch.int32, device=DEVICE)
            view = nwor_specpv.PartialView(torch.stack(lists), counts, self.lens, PAGE)
        return Set(query, key, value, table, used, torch.empty_like(query), view)

    def ours(self, s: Set, tree: bool, route: str = "cuda") -> torch.Tensor:
        return nwor_specpv.verify_attention(
            s.query,
            s.key,
            s.value,
            self.pool.keys,
            self.pool.values,
            s.table,
            self.lens,
            self.starts,
            self.tree if tree else None,
            HEAD_DIM**-0.5,
            view=s.view,
            out=s.out,
            max_rows=self.case.rows,
            plan=self.plans[tree] if route == "cuda" else None,
            route=route,
        )

    def reference(self, s: Set, tree: bool, request: int) -> torch.Tensor:
        """One request in float64, head by head, from gathered tokens."""
        rows = self.case.rows
        length = self.case.lens[request]
        at = torch.arange(length, device=DEVICE)
        page = s.table[request, at // PAGE].long()
        keys = self.pool.take(self.pool.keys, page, at % PAGE)
        values = self.pool.take(self.pool.values, page, at % PAGE)
        own = slice(request * rows, (request + 1) * rows)
        if tree:
            j = torch.arange(rows, device=DEVICE)
            seen = (self.tree[own][:, j // 64] >> (j % 64) & 1).bool()
        else:
            seen = torch.ones(rows, rows, dtype=torch.bool, device=DEVICE).tril()
        seen = torch.cat([seen.new_ones(rows, length), seen], 1)
        out = torch.empty(rows, HEADS, HEAD_DIM, dtype=torch.float64, device=DEVICE)
        group = HEADS // KV_HEADS
        for head in range(HEADS):
            kv = head // group
            k = torch.cat([keys[:, kv], s.key[own, kv].double()])
            v = torch.cat([values[:, kv], s.value[own, kv].double()])
            scores = s.query[own, head].double() @ k.T * HEAD_DIM**-0.5
            out[:, head] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        return out

    def error(self, run: Callable[[Set], torch.Tensor], tree: bool) -> float:
        """The largest error of the shortest and the longest request of the last set."""
        s = self.sets[-1]
        s.out.fill_(math.nan)
        out = run(s).view(-1, self.case.rows, HEADS, HEAD_DIM)
        requests = {self.case.lens.index(f(self.case.lens)) for f in (min, max)}
        return max(
            (out[b].double() - self.reference(s, tree, b)).abs().max().item() for b in requests
        )


# ---- peers: name -> call(bench, set), or why it is missing ------------------------------------


def read_floor() -> Callable[[Bench, Set], object]:
    """A kernel that reads the prefix pages and nothing else."""
    import triton
    import triton.language as tl

    @triton.jit
    def read_pages(keys, values, pages, sink, size: tl.constexpr):
        page = tl.load(pages + tl.program_id(0)).to(tl.int64)
        at = page * size + tl.arange(0, size)
        k = tl.load(keys + at, eviction_policy="evict_first")
        v = tl.load(values + at, eviction_policy="evict_first")
        total = tl.sum(k ^ v, 0)
        tl.store(sink, total, mask=total == 0x12345678)

    sink = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def run(bench: Bench, s: Set) -> None:
        keys = bench.pool.keys.view(torch.uint8).view(torch.int32)
        values = bench.pool.values.view(torch.uint8).view(torch.int32)
        size = keys[0].numel()
        read_pages[(s.pages.numel(),)](keys, values, s.pages, sink, size=size, num_warps=8)

    return run


def paged_arguments(bench: Bench, s: Set) -> dict[str, Any]:
    """What vLLM's paged kernels take, by the names they share."""
    if bench.case.cache != "bfloat16" or bench.case.view:
        raise NotImplementedError("bfloat16 pages only")
    return {
        "q": s.query,
        "k": bench.pool.keys,
        "v": bench.pool.values,
        "out": s.out,
        "cu_seqlens_q": bench.starts,
        "max_seqlen_q": bench.case.rows,
        "seqused_k": bench.all_lens,
        "max_seqlen_k": max(bench.case.lens) + bench.case.rows,
        "softmax_scale": HEAD_DIM**-0.5,
        "causal": True,
        "block_table": s.table,
    }


def flash_attention_3() -> Callable[[Bench, Set], torch.Tensor]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def run(bench: Bench, s: Set) -> torch.Tensor:
        flash_attn_varlen_func(**paged_arguments(bench, s), fa_version=3)
        return s.out

    return run


def vllm_triton() -> Callable[[Bench, Set], torch.Tensor]:
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        from vllm.attention.ops.triton_unified_attention import unified_attention

    def run(bench: Bench, s: Set) -> torch.Tensor:
        unified_attention(
            **paged_arguments(bench, s),
            window_size=(-1, -1),
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return s.out

    return run


def flash_attention_2_folded() -> Callable[[Bench, Set], object]:
    """LibTorch's kernel over contiguous prefixes it gets for free, rows folded into the group.

    The prefix only: the in-flight rows are left out, to its advantage.
    """
    contiguous: dict[str, object] = {}

    def run(bench: Bench, s: Set) -> None:
        case = bench.case
        if case.cache != "bfloat16" or case.view or len(set(case.lens)) > 1:
            raise NotImplementedError("uniform bfloat16 batches only")
        batch, length = len(case.lens), case.lens[0]
        shape = (batch, length, KV_HEADS, HEAD_DIM)
        if contiguous.get("shape") != shape:
            contiguous.clear()
            contiguous["shape"] = shape
            sets = min(len(bench.sets), 4)
            contiguous["kv"] = [
                tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
                for _ in range(sets)
            ]
        keys, values = contiguous["kv"][bench.sets.index(s) % len(contiguous["kv"])]
        group = HEADS // KV_HEADS
        folded = (
            s.query.view(batch, case.rows, KV_HEADS, group, HEAD_DIM)
            .transpose(2, 3)
            .reshape(batch, case.rows * group, KV_HEADS, HEAD_DIM)
        )
        torch.ops.aten._flash_attention_forward(
            folded,
            keys,
            values,
            None,
            None,
            case.rows * group,
            length,
            0.0,
            False,
            False,
            scale=HEAD_DIM**-0.5,
        )

    return run


PEERS: dict[str, tuple[Callable[[], Callable[[Bench, Set], object]], bool]] = {
    # name: (maker, whether its output is comparable with our chain)
    "read": (read_floor, False),
    "FA3": (flash_attention_3, True),
    "FA2 folded": (flash_attention_2_folded, False),
    "vLLM Triton": (vllm_triton, True),
}


def find_peers() -> tuple[dict[str, Callable[[Bench, Set], object]], dict[str, str]]:
    found, missing = {}, {}
    for name, (maker, _) in PEERS.items():
        try:
            found[name] = maker()
        except Exception as error:  # whatever keeps a peer from loading is the answer
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing


def measure(case: Case, peers: dict, replays: int, seed: int) -> dict:
    bench = Bench(case, seed)
    variants: dict[str, Callable[[Set], object]] = {
        "ours": lambda s: bench.ours(s, False),
        "ours tree": lambda s: bench.ours(s, True),
    }
    errors: dict[str, float] = {}
    routes: dict[str, str] = {}
    left_out: dict[str, str] = {}
    if case.section == "rows64":
        variants["fast tree"] = lambda s: bench.ours(s, True, "fast")
    for name, call in peers.items():
        variants[name] = lambda s, call=call: call(bench, s)
    graphs, calls = {}, {}
    for name, run in list(variants.items()):

        def all_sets(run=run) -> None:
            for i in range(bench.calls):
                run(bench.sets[i % len(bench.sets)])

        try:
            if name.startswith(("ours", "fast")):
                errors[name] = bench.error(run, name.endswith("tree"))
                routes[name] = last_route()
            elif name in PEERS and PEERS[name][1]:
                errors[name] = bench.error(run, False)
            graphs[name] = capture(all_sets)
            calls[name] = bench.calls
        except NotImplementedError as error:
            left_out[name] = str(error)
        except Exception as error:
            if name.startswith("ours"):
                raise
            left_out[name] = f"{type(error).__name__}: {error}"
    timings = time_graphs(graphs, calls, replays)
    return {
        "case": asdict(case),
        "name": case.name,
        "kv_bytes": bench.bytes,
        "timings": {name: asdict(t) for name, t in timings.items()},
        "errors": errors,
        "routes": routes,
        "left_out": left_out,
    }


def row(result: dict) -> str:
    case, timings = result["case"], result["timings"]
    us = {name: t["median_us"] for name, t in timings.items()}

    def shown(name: str) -> str:
        if name not in timings:
            return "-"
        t = timings[name]
        return str(Timing(t["median_us"], t["spread_us"], t["replays"]))

    ours = us["ours"]
    ratio = f"{ours / us['FA3']:.2f}" if "FA3" in us else "-"
    floor = f"{100 * us['read'] / ours:.1f} %" if "read" in us else "-"
    errors = result["errors"]
    error = f"{errors['ours']:.1e}" if "ours" in errors else "-"
    if "FA3" in errors:
        error += f" (FA3 {errors['FA3']:.1e})"
    goal = case["goal_us"]
    mark = "" if goal is None else f"{goal:.0f} {'met' if ours <= goal else 'missed'}"
    name = result["name"] + (" view" if case["view"] else "")
    name += " fp8" if case["cache"].startswith("float8") else ""
    return (
        f"{name:<24}{case['rows']:>5}  {shown('ours'):<17}{shown('FA3'):<17}"
        f"{shown('FA2 folded'):<17}{ratio:<10}{floor:<15}{us['ours tree'] / ours:<12.3f}"
        f"{result['kv_bytes'] / ours / 1e6:<7.2f}{mark:<13}{error}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="k1,odd,ragged,view,fp8,rows64")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("attention_gpu: no CUDA device", file=sys.stderr)
        return 1
    peers, missing = find_peers()
    environment = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _stamp.read_stamp().revision,
        "seed": options.seed,
        "missing_peers": missing,
    }
    print(
        f"device {environment['device']} · torch {torch.__version__}"
        f" · commit {environment['commit']}"
        f" · bf16, {HEADS}/{KV_HEADS} heads, D {HEAD_DIM}, page {PAGE} shuffled"
        f" · median of {options.replays}, spread in brackets · seed={options.seed}"
    )
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    print(
        f"{'B x L':<24}{'rows':>5}  {'ours us':<17}{'FA3 us':<17}{'FA2 folded us':<17}"
        f"{'ours/FA3':<10}{'of read floor':<15}{'tree/chain':<12}{'TB/s':<7}"
        f"{'goal us':<13}max err (fp64)"
    )
    results = []
    for case in cases(options.sections.split(",")):
        result = measure(case, peers, options.replays, options.seed)
        results.append(result)
        print(row(result), flush=True)
        torch.cuda.empty_cache()
        if options.json:  # after every case: a run that is cut short keeps what it has
            document = {"environment": environment, "results": results}
            options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
