"""One verification step's tensors on a CUDA device, and what it should give, in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

import nwor_specpv
from nwor_specpv import _stamp

HEADS, KV_HEADS, PAGE = 32, 8, 16
SET_BYTES = 300_000_000
DEVICE = "cuda"


def measured_with() -> dict[str, str]:
    """What a file of results says of its run."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": _stamp.read_stamp().revision,
    }


@dataclass(frozen=True)
class Case:
    section: str
    lens: tuple[int, ...]
    rows: int
    cache: str = "bfloat16"
    dtype: str = "bfloat16"  # of the rows; the cache's, unless that is float8
    head_dim: int = 128
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    view: bool = False  # per-head block lists over all pages, each head in an order of its own
    compact: bool = False  # a contiguous copy of all tokens
    goal_us: float | None = None

    @property
    def name(self) -> str:
        kinds = sorted(set(self.lens), reverse=True)
        return " + ".join(f"{self.lens.count(n)} x {n}" for n in kinds)

    @property
    def tokens(self) -> int:
        return sum(self.lens)


def cases_of(section: str, shapes: str, rows: str) -> list[Case]:
    """Shapes as a command line names them, `BxL,...`, each with every number of rows, `R,...`."""
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]
    return [
        Case(section, (length,) * batch, int(count))
        for batch, length in sizes
        for count in rows.split(",")
    ]


def random_tree(rows: int, rng: random.Random) -> list[int]:
    """Row r's visible rows as a bit mask: itself and its ancestors; parents come first."""
    masks: list[int] = []
    for row in range(rows):
        seen = masks[rng.randrange(row)] if row else 0
        masks.append(seen | 1 << row)
    return masks


class Pool:
    """One cache that all K/V sets of a case take their pages from."""

    def __init__(self, dtype: torch.dtype, num_pages: int, kv_heads: int, head_dim: int) -> None:
        shape = (num_pages, PAGE, kv_heads, head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(2))
        self.caches = self.keys, self.values
        step = 1 << 14
        for cache in self.caches:
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
    view: nwor_specpv.ops.attention.View | None


@dataclass(frozen=True)
class Errors:
    """Of an output against float64: absolute differences over rows, heads and channels."""

    mean: float
    rms: float
    max: float


class Bench:
    def __init__(self, case: Case, seed: int, most_sets: int | None = None) -> None:
        self.case = case
        rng = random.Random(seed)
        torch.manual_seed(seed)
        dtype = getattr(torch, case.cache)
        batch, rows = len(case.lens), case.rows
        prefix_pages = [math.ceil(n / PAGE) for n in case.lens]
        pages = [math.ceil((n + rows) / PAGE) for n in case.lens]
        token_bytes = 2 * case.kv_heads * case.head_dim * dtype.itemsize
        self.bytes = case.tokens * token_bytes
        num_sets = max(1, math.ceil(SET_BYTES / self.bytes))
        if most_sets is not None:
            num_sets = min(num_sets, most_sets)
        self.pool = Pool(dtype, num_sets * sum(pages), case.kv_heads, case.head_dim)
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
        self.references: dict[tuple[bool, int], torch.Tensor] = {}

    def _make_set(self, table: torch.Tensor, used: torch.Tensor) -> Set:
        case = self.case
        total = len(case.lens) * case.rows

        def draw(heads: int) -> torch.Tensor:
            drawn = torch.randn(total, heads, case.head_dim, device=DEVICE)
            return drawn.to(getattr(torch, case.dtype))

        query, key, value = draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)
        for b, length in enumerate(case.lens):
            rows = slice(b * case.rows, (b + 1) * case.rows)
            at = torch.arange(length, length + case.rows, device=DEVICE)
            page = table[b, at // PAGE].long()
            self.pool.put(self.pool.keys, page, at % PAGE, key[rows])
            self.pool.put(self.pool.values, page, at % PAGE, value[rows])
        view: nwor_specpv.ops.attention.View | None = None
        if case.compact:
            keys, values = (self._compact(cache, table) for cache in self.pool.caches)
            view = nwor_specpv.CompactView(keys, values, self.lens)
        if case.view:
            blocks = case.lens[0] // PAGE
            lists = [
                torch.stack(
                    [t[torch.randperm(blocks, device=DEVICE)] for _ in range(case.kv_heads)]
                )
                for t in table[:, :blocks]
            ]
            counts = torch.full((len(case.lens),), blocks, dtype=torch.int32, device=DEVICE)
            view = nwor_specpv.PartialView(torch.stack(lists), counts, self.lens, PAGE)
        return Set(query, key, value, table, used, torch.empty_like(query), view)

    def _compact(self, cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, N, D] of prefixes that are equally long."""
        tokens = cache[table[:, : self.case.lens[0] // PAGE].long()]  # [B, pages, PAGE, Hkv, D]
        return tokens.flatten(1, 2).transpose(1, 2).contiguous()

    def ours(
        self, s: Set, tree: bool, route: str = "cuda", *, prefix_ready: bool = False
    ) -> torch.Tensor:
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
            self.case.head_dim**-0.5,
            view=s.view,
            out=s.out,
            max_rows=self.case.rows,
            plan=self.plans[tree] if route == "cuda" else None,
            route=route,
            prefix_ready=prefix_ready,
        )

    def reference(self, s: Set, tree: bool, request: int) -> torch.Tensor:
        """One request in float64, head by head, from gathered tokens."""
        rows, heads, head_dim = self.case.rows, self.case.heads, self.case.head_dim
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
        out = torch.empty(rows, heads, head_dim, dtype=torch.float64, device=DEVICE)
        group = heads // self.case.kv_heads
        for head in range(heads):
            kv = head // group
            k = torch.cat([keys[:, kv], s.key[own, kv].double()])
            v = torch.cat([values[:, kv], s.value[own, kv].double()])
            scores = s.query[own, head].double() @ k.T * head_dim**-0.5
            out[:, head] = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        return out

    def errors(self, run: Callable[[Set], torch.Tensor], tree: bool) -> Errors:
        """Of the shortest and the longest request of the last set, all their rows and heads."""
        s = self.sets[-1]
        s.out.fill_(math.nan)
        out = run(s).view(-1, self.case.rows, self.case.heads, self.case.head_dim)
        wrong = torch.cat([(out[b].double() - self.expected(tree, b)).flatten() for b in self.ends])
        mean, rms = wrong.abs().mean().item(), wrong.square().mean().sqrt().item()
        return Errors(mean, rms, wrong.abs().max().item())

    @property
    def ends(self) -> list[int]:
        lens = self.case.lens
        return sorted({lens.index(min(lens)), lens.index(max(lens))})

    def expected(self, tree: bool, request: int) -> torch.Tensor:
        """The reference of the last set, computed once."""
        found = self.references.get((tree, request))
        if found is None:
            found = self.reference(self.sets[-1], tree, request)
            self.references[tree, request] = found
        return found
