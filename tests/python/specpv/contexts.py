"""Random paged K with known contents, and references in plain Python and float64."""

from __future__ import annotations

import os
import random
import secrets
from dataclasses import dataclass

import numpy as np
import torch

from nwor_specpv import cache_views

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
FLOAT8 = torch.float8_e4m3fn


def seeded() -> random.Random:
    seed = int(os.environ.get("NWOR_TEST_SEED") or secrets.randbits(32))
    print(f"seed={seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


@dataclass
class Pages:
    """Paged K and V of some requests, everything that is no token of theirs NaN."""

    key: torch.Tensor  # [P, S, H, D] views
    value: torch.Tensor
    table: torch.Tensor  # [B, maxp] int32
    lengths: list[int]
    k_scale: torch.Tensor | None = None

    def tokens(self, request: int) -> np.ndarray:
        """K of a request's tokens in float64, [tokens, H, D], gathered one by one."""
        size = self.key.shape[1]
        rows = []
        scale = 1.0
        if self.k_scale is not None:
            scale = self.k_scale.float().cpu().numpy().reshape(-1, 1)
        for token in range(self.lengths[request]):
            page = int(self.table[request, token // size])
            row = self.key[page, token % size].float().cpu().numpy()
            rows.append((row * np.float32(scale)).astype(np.float64))
        return np.stack(rows) if rows else np.zeros((0, *self.key.shape[2:]))


def of_pages(summaries: torch.Tensor, table: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """[.., count, Hkv, D]: of summaries [.., P, blocks of a page, Hkv, D] those of one request's
    blocks from `first` on, gathered one by one."""
    parts = summaries.shape[-3]
    blocks = [summaries[..., int(table[n // parts]), n % parts, :, :]
              for n in range(first, first + count)]  # fmt: skip
    return torch.stack(blocks, -3) if blocks else summaries[..., 0, :0, :, :]


def make_pages(
    lengths: list[int],
    *,
    heads: int = 2,
    dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "packed",
    device: str = "cpu",
    scales: int = 0,
    integers: bool = False,
    spare: int = 3,
) -> Pages:
    """`scales`: 0 none, 1 one, more: one for each head."""
    needed = [-(-length // page_size) for length in lengths]
    total = sum(needed) + spare
    shapes = {
        "kv_first": (2, total, page_size, heads, dim),
        "kv_second": (total, 2, page_size, heads, dim),
        "head_major": (2, total, heads, page_size, dim),
        "packed": (total, heads, page_size, 2 * dim),
    }
    storage = torch.full(shapes[layout], float("nan"), dtype=torch.float32)
    order = torch.randperm(total)
    width = max(needed, default=0) + 2
    table = torch.full((len(lengths), width), -7, dtype=torch.int32)
    key, value = cache_views(storage, layout)
    first = 0
    for request, length in enumerate(lengths):
        pages = order[first : first + needed[request]]
        first += needed[request]
        table[request, : len(pages)] = pages.int()
        for token in range(length):
            at = int(pages[token // page_size]), token % page_size
            if integers:
                key[at] = torch.randint(-3, 4, (heads, dim)).float()
            else:
                key[at] = torch.randn(heads, dim)
            value[at] = torch.randn(heads, dim)
    storage = storage.to(device).to(dtype)
    key, value = cache_views(storage, layout)
    scale = None
    if scales:
        scale = torch.rand(1 if scales == 1 else heads, device=device) + 0.25
    return Pages(key, value, table.to(device), lengths, scale)


def summaries_of(tokens: np.ndarray, start: int, end: int, size: int) -> tuple[list, list]:
    """Extremes of every complete block, by Python's own max and min."""
    upper, lower = [], []
    for first in range(start, end - size + 1, size):
        rows = tokens[first : first + size]
        high, low = rows[0].copy(), rows[0].copy()
        for row in rows[1:]:
            for at in np.ndindex(row.shape):
                high[at] = max(high[at], row[at])
                low[at] = min(low[at], row[at])
        upper.append(high)
        lower.append(low)
    return upper, lower


def scores_of(
    query: np.ndarray,  # [Q, Hq, D]
    kmax: np.ndarray,  # [N, Hkv, D]
    kmin: np.ndarray,
    score: str,
    query_reduce: str,
    group_reduce: str,
) -> np.ndarray:
    """[Hkv, N] in float64, one block after the other."""
    blocks, kv_heads, _ = kmax.shape
    group = query.shape[1] // kv_heads
    reduce = {"mean": np.mean, "max": np.max, "last": lambda rows: rows[-1]}
    result = np.zeros((kv_heads, blocks))
    for head in range(kv_heads):
        for block in range(blocks):
            high, low = kmax[block, head], kmin[block, head]
            of_heads = []
            for member in range(head * group, (head + 1) * group):
                rows = []
                for row in query[:, member]:
                    if score == "specpv":
                        rows.append(max(row @ high, row @ low))
                    else:
                        rows.append(np.maximum(row * high, row * low).sum())
                of_heads.append(reduce[query_reduce](rows))
            result[head, block] = reduce[group_reduce](of_heads)
    return result


def best(scores: np.ndarray, k: int) -> list[int]:
    """Ids of the k highest, the lower id first among equals, ascending, -1 padded."""
    order = sorted(range(len(scores)), key=lambda block: (-scores[block], block))
    return sorted(order[:k]) + [-1] * (k - min(k, len(scores)))
