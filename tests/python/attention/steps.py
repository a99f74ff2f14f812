"""Random verification steps with poisoned memory, and what attention over them should give.

The reference knows nothing of blocks, splits or masks as words: for every row and head it collects
the tokens the row may see into a list, by position, and takes an fp64 softmax over them.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nwor_specpv import CompactView, PartialView, cache_views, verify_attention

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SEED = int(os.environ.get("NWOR_TEST_SEED", random.SystemRandom().randrange(2**31)))
FP8 = torch.float8_e4m3fn
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
LAYOUTS = ("kv_first", "kv_second", "packed", "head_major")
OUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2.2e-2}
LSE_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3}


def row_dtypes(device: str) -> tuple[torch.dtype, ...]:
    half = (torch.float16, torch.bfloat16)
    return half if device == "cuda" else (torch.float32, *half)


@dataclass
class Shape:
    """What a step is made of; lists hold one entry per request."""

    rows: list[int]
    prefix: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: the rows' dtype
    layout: str = "kv_first"
    mask: str = "causal"  # or "tree", "chain" (a mask that says causal), "random"
    view: str = "none"  # or "partial", "compact", "mixed_partial", "mixed_compact"
    block_size: int = 16
    scales: str = "none"  # or "tensor", "head"
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    poison: bool = True


@dataclass
class Step:
    """One call's arguments, and the tokens each (request, KV head) sees before its rows."""

    shape: Shape
    arguments: dict[str, torch.Tensor]
    tree_mask: torch.Tensor | None
    options: dict[str, Any]
    seen: list[
        list[list[int]]
    ]  # [request][KV head] -> slots in token order; -1 - i: compact token i
    visible: list[list[set[int]]] = field(default_factory=list)  # [request][row] -> rows it sees

    @property
    def scale(self) -> float:
        given = self.shape.scale
        return 1.0 / math.sqrt(self.shape.head_dim) if given is None else given

    def run(self, **changes: Any):
        options = {**self.options, "return_lse": True, **changes}
        return verify_attention(
            **self.arguments, tree_mask=self.tree_mask, scale=self.scale, **options
        )

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return _reference(self)

    def with_lengths(self, lengths: list[int]) -> Step:
        """The same step in the same memory, over as many tokens: `prefix_lens` is set to them."""
        self.arguments["prefix_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        seen = [
            [slots[:length] for slots in heads]
            for heads, length in zip(self.seen, lengths, strict=True)
        ]
        return replace(self, shape=replace(self.shape, prefix=lengths), seen=seen)

    def only(self, request: int) -> Step:
        """The same step with one of its requests alone, in the same memory."""
        start = self.arguments["query_start"].tolist()
        rows = slice(start[request], start[request + 1])
        one = slice(request, request + 1)
        arguments = dict(self.arguments)
        for name in ("query", "key", "value"):
            arguments[name] = arguments[name][rows]
        for name in ("block_table", "prefix_lens"):
            arguments[name] = arguments[name][one]
        arguments["query_start"] = torch.tensor(
            [0, rows.stop - rows.start], dtype=torch.int32, device=arguments["query"].device
        )
        options = dict(self.options)
        view = options.get("view")
        if isinstance(view, PartialView):
            options["view"] = PartialView(
                view.blocks[one], view.num_blocks[one], view.view_lens[one], view.block_size
            )
        if isinstance(view, CompactView):
            options["view"] = CompactView(view.keys[one], view.values[one], view.lens[one])
        shape = replace(self.shape, rows=self.shape.rows[one], prefix=self.shape.prefix[one])
        mask = None if self.tree_mask is None else self.tree_mask[rows].contiguous()
        return Step(shape, arguments, mask, options, self.seen[one], self.visible[one])


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator):
    """NaN and infinities; float8 knows only NaN."""
    if dtype == FP8:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(FP8)
    values = np.array([np.nan, np.inf, -np.inf], dtype=np.float32)
    return torch.from_numpy(values[rng.integers(0, 3, size=shape)]).to(dtype)


def _noise(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator, spread=1.0):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * spread).to(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """float8 as bytes: torch copies but does not index it."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _visible_rows(shape: Shape, rng: np.random.Generator) -> list[list[set[int]]]:
    """Per request and row, the rows it sees: as sets, from parents where there is a tree."""
    result = []
    for rows in shape.rows:
        sees: list[set[int]] = []
        for row in range(rows):
            if shape.mask in ("causal", "chain"):
                sees.append(set(range(row + 1)))
            elif shape.mask == "tree":
                parent = int(rng.integers(0, row)) if row else None
                sees.append({row} | (sees[parent] if parent is not None else set()))
            else:
                sees.append({j for j in range(rows) if rng.random() < 0.4})
        result.append(sees)
    return result


def _mask_words(shape: Shape, visible: list[list[set[int]]], rng: np.random.Generator):
    if shape.mask == "causal":
        return None
    words = max(1, -(-max(shape.rows, default=1) // 64))
    mask = np.zeros((sum(shape.rows), words), dtype=np.uint64)
    t = 0
    for rows, sees in zip(shape.rows, visible, strict=True):
        for row in range(rows):
            for j in sees[row]:
                mask[t, j // 64] |= np.uint64(1) << np.uint64(j % 64)
            if shape.poison:  # bits of rows the request does not have mean nothing
                for j in range(rows, words * 64):
                    if rng.random() < 0.3:
                        mask[t, j // 64] |= np.uint64(1) << np.uint64(j % 64)
            t += 1
    return torch.from_numpy(mask.view(np.int64))


def _poison_before_windows(shape: Shape, table, key_cache, value_cache, visible, seen) -> None:
    """What no row's window reaches: NaN, and entries of the table that name no page."""
    for b, sees in enumerate(visible):
        depths = [row if shape.mask == "causal" else len(s) - 1 for row, s in enumerate(sees)]
        length = shape.prefix[b]
        first = max(0, length + min(depths) - shape.window + 1) if depths else length
        for head, own in enumerate(seen[b]):
            slots = torch.tensor(own[:first], dtype=torch.int64)
            where = slots // shape.page_size, slots % shape.page_size, head
            for cache in (key_cache, value_cache):
                _bytes(cache)[where] = 0x7F if cache.dtype == FP8 else math.nan
        hidden = first // shape.page_size if first < length else -(-length // shape.page_size)
        table[b, :hidden] = -7


def make_step(shape: Shape, seed: int, device: str = "cpu") -> Step:
    rng = np.random.default_rng(seed)
    requests, size, heads, dim = len(shape.rows), shape.page_size, shape.kv_heads, shape.head_dim
    cache_dtype = shape.cache_dtype or shape.dtype
    pages_of = [-(-length // size) for length in shape.prefix]
    max_pages = max(1, max(pages_of, default=1)) + 2
    num_pages = sum(pages_of) + 3
    order = rng.permutation(num_pages).tolist()
    table = rng.integers(-(2**31), 2**31 - 1, size=(requests, max_pages), dtype=np.int64)
    if not shape.poison:
        table[:] = 0
    pages = [[order.pop() for _ in range(count)] for count in pages_of]
    for b, own in enumerate(pages):
        table[b, : len(own)] = own

    sizes = {
        "kv_first": (2, num_pages, size, heads, dim),
        "kv_second": (num_pages, 2, size, heads, dim),
        "packed": (num_pages, heads, size, 2 * dim),
        "head_major": (2, num_pages, heads, size, dim),
    }[shape.layout]
    if shape.poison:
        memory = _poisoned(sizes, cache_dtype, rng)
    else:
        memory = torch.zeros(sizes, dtype=torch.float32).to(cache_dtype)
    key_cache, value_cache = cache_views(memory, shape.layout)

    view, seen = _make_view(shape, pages, rng)
    spread = 1.0 if cache_dtype != FP8 else 2.0
    for b in range(requests):
        for head in range(heads):
            slots = np.array([slot for slot in seen[b][head] if slot >= 0], dtype=np.int64)
            where = torch.from_numpy(slots // size), torch.from_numpy(slots % size), head
            for cache in (key_cache, value_cache):
                values = _noise((len(slots), dim), torch.float32, rng, spread).to(cache_dtype)
                _bytes(cache)[where] = _bytes(values)

    total = sum(shape.rows)
    arguments = {
        "query": _noise((total, shape.heads, dim), shape.dtype, rng),
        "key": _noise((total, heads, dim), shape.dtype, rng),
        "value": _noise((total, heads, dim), shape.dtype, rng),
        "block_table": torch.from_numpy(table.astype(np.int32)),
        "prefix_lens": torch.tensor(shape.prefix, dtype=torch.int32),
        "query_start": torch.tensor(np.cumsum([0, *shape.rows]), dtype=torch.int32),
    }
    options: dict[str, Any] = {"window": shape.window, "softcap": shape.softcap}
    if shape.scales != "none":
        count = heads if shape.scales == "head" else 1
        for name in ("k_scale", "v_scale"):
            options[name] = torch.from_numpy(rng.uniform(0.3, 1.2, count).astype(np.float32))
    if view is not None:
        options["view"] = view
    visible = _visible_rows(shape, rng)
    mask = _mask_words(shape, visible, rng)
    if shape.poison and shape.window:
        _poison_before_windows(
            shape, arguments["block_table"], key_cache, value_cache, visible, seen
        )

    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    memory = memory.to(device)
    arguments["key_cache"], arguments["value_cache"] = cache_views(memory, shape.layout)
    options = {name: _to_device(value, device) for name, value in options.items()}
    return Step(shape, arguments, None if mask is None else mask.to(device), options, seen, visible)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides, one element further on: aligned to nothing."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.empty(reach + 1, dtype=tensor.dtype, device=tensor.device)
    view = memory[1:].as_strided(tensor.shape, tensor.stride())
    return view.copy_(tensor)


def _to_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, PartialView):
        return PartialView(
            value.blocks.to(device),
            value.num_blocks.to(device),
            value.view_lens.to(device),
            value.block_size,
        )
    if isinstance(value, CompactView):
        return CompactView(value.keys.to(device), value.values.to(device), value.lens.to(device))
    return value


def _make_view(shape: Shape, pages: list[list[int]], rng: np.random.Generator):
    """The view, if there is one, and the tokens every request and head sees through it."""
    size, heads, block = shape.page_size, shape.kv_heads, shape.block_size
    whole = [
        [[own[t // size] * size + t % size for t in range(length)] for _ in range(heads)]
        for own, length in zip(pages, shape.prefix, strict=True)
    ]
    if shape.view == "none":
        return None, whole
    requests = len(pages)
    uses_view = [not shape.view.startswith("mixed") or rng.random() < 0.5 for _ in range(requests)]
    seen = list(whole)
    if shape.view.endswith("compact"):
        room = max(1, max(shape.prefix, default=1))
        keys = _poisoned((requests, heads, room, shape.head_dim), shape.dtype, rng)
        values = keys.clone()
        lens = np.full(requests, -1, dtype=np.int32)
        for b in range(requests):
            if uses_view[b]:
                count = int(rng.integers(0, shape.prefix[b] + 1))
                lens[b] = count
                keys[b, :, :count] = _noise((heads, count, shape.head_dim), shape.dtype, rng)
                values[b, :, :count] = _noise((heads, count, shape.head_dim), shape.dtype, rng)
                seen[b] = [[-1 - t for t in range(count)] for _ in range(heads)]
        return CompactView(keys, values, torch.from_numpy(lens)), seen

    parts = size // block
    room = max(1, max((len(own) * parts for own in pages), default=1)) + 1
    blocks = rng.integers(-(2**31), 2**31 - 1, size=(requests, heads, room), dtype=np.int64)
    num_blocks = np.full(requests, -1, dtype=np.int32)
    lens = rng.integers(-(2**31), 2**31 - 1, size=requests, dtype=np.int64)
    for b, own in enumerate(pages):
        if not uses_view[b]:
            continue
        whole_blocks = shape.prefix[b] // block
        count = int(rng.integers(0, whole_blocks + 1))
        num_blocks[b] = count
        lens[b] = max(0, count * block - (int(rng.integers(0, block)) if count else 0))
        seen[b] = []
        for head in range(heads):
            chosen = np.sort(rng.choice(whole_blocks, size=count, replace=False)) if count else []
            ids = [own[int(i) // parts] * parts + int(i) % parts for i in chosen]
            blocks[b, head, :count] = ids
            slots = [i * block + offset for i in ids for offset in range(block)]
            seen[b].append(slots[: int(lens[b])])
    view = PartialView(
        torch.from_numpy(blocks.astype(np.int32)),
        torch.from_numpy(num_blocks),
        torch.from_numpy(lens.astype(np.int32)),
        block,
    )
    return view, seen


def _reference(step: Step) -> tuple[np.ndarray, np.ndarray]:
    shape = step.shape
    tensors = {
        name: step.arguments[name].cpu().double().numpy() for name in ("query", "key", "value")
    }
    caches = [
        step.arguments[name].cpu().float().double().numpy() for name in ("key_cache", "value_cache")
    ]
    scales = []
    for name in ("k_scale", "v_scale"):
        given = step.options.get(name)
        values = np.ones(1) if given is None else given.cpu().double().numpy()
        scales.append(np.broadcast_to(values, shape.kv_heads))
    group = shape.heads // shape.kv_heads
    out = np.zeros(tensors["query"].shape)
    lse = np.full(out.shape[:2], -np.inf)
    starts = np.cumsum([0, *shape.rows])
    for b, rows in enumerate(shape.rows):
        for head in range(shape.kv_heads):
            prefix = _prefix_tokens(step, caches, scales, b, head)
            for row in range(rows):
                keys, values = _tokens_of(step, tensors, prefix, b, head, row, starts[b])
                for h in range(head * group, (head + 1) * group):
                    t = starts[b] + row
                    logits = keys @ tensors["query"][t, h] * step.scale
                    if shape.softcap:
                        logits = shape.softcap * np.tanh(logits / shape.softcap)
                    if len(logits):
                        lse[t, h] = np.logaddexp.reduce(logits)
                        out[t, h] = np.exp(logits - lse[t, h]) @ values
    return out, lse


def _prefix_tokens(step: Step, caches, scales, b: int, head: int):
    """K and V of what (b, head) sees before its rows."""
    slots = np.array(step.seen[b][head], dtype=np.int64)
    dim = step.shape.head_dim
    if len(slots) == 0:
        return np.zeros((0, dim)), np.zeros((0, dim))
    if slots[0] < 0:
        view = step.options["view"]
        return tuple(
            tensor[b, head].cpu().double().numpy()[-1 - slots]
            for tensor in (view.keys, view.values)
        )
    size = step.shape.page_size
    return tuple(
        cache[slots // size, slots % size, head] * scale[head]
        for cache, scale in zip(caches, scales, strict=True)
    )


def _tokens_of(step: Step, tensors, prefix, b: int, head: int, row: int, start: int):
    sees = step.visible[b]
    length, window = step.shape.prefix[b], step.shape.window
    # A row's position: its depth in the tree, or its index in the chain.
    position = [
        length + (j if step.tree_mask is None else len(sees[j]) - 1) for j in range(len(sees))
    ]
    first = position[row] - window + 1 if window else -math.inf
    rows = [j for j in sorted(sees[row]) if position[j] >= first]
    skip = max(0, int(first)) if window else 0
    chosen = [start + j for j in rows]
    return tuple(
        np.concatenate([part[skip:], tensors[name][chosen, head]])
        for part, name in zip(prefix, ("key", "value"), strict=True)
    )


def assert_close(
    step: Step,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    unit: float | np.ndarray = 1.0,
) -> None:
    """Compares with the reference; a NaN anywhere is an error. `unit`: how large values are, of all
    rows or of each."""
    expected, expected_lse = step.reference()
    got = out.detach().cpu().double().numpy()
    spread = 2.0 if step.shape.cache_dtype == FP8 else 1.0
    error = np.abs(got - expected)
    assert np.isfinite(got).all(), "out holds NaN or infinity"
    # Weights and outputs are rounded relative to their size.
    limit = OUT_TOLERANCE[step.shape.dtype] * spread * np.maximum(unit, np.abs(expected) / 2)
    assert (error <= limit).all(), error.max()
    if lse is not None:
        got_lse = lse.detach().cpu().double().numpy()
        empty = np.isneginf(expected_lse)
        assert (np.isneginf(got_lse) == empty).all()
        error = np.abs(got_lse[~empty] - expected_lse[~empty])
        limit = LSE_TOLERANCE[step.shape.dtype] * np.maximum(1.0, np.abs(expected_lse[~empty]))
        assert (error <= limit).all(), error.max()
