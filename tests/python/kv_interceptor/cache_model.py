"""A paged cache and an interceptor in plain Python: dictionaries and byte strings.

The reference the fuzzer compares the library with, so nothing here is shared with it: caches are
flat byte arrays addressed by formulas written out per layout, staged rows are dictionary entries,
float8 codes come from a search over the 127 magnitudes that exist. No torch.
"""

from __future__ import annotations

import numpy as np

# ---- float8 e4m3 ----

# Magnitudes of the codes 0x00..0x7e: eight steps of 2^-9, then 8..15 times a power of two.
_MAGNITUDES = np.array(
    [
        code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10)
        for code in range(127)
    ],
    dtype=np.float64,
)
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """Nearest code, ties to the even one, 448 at most; NaN is 0x7f."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        size = np.abs(values.astype(np.float64))
    below = np.searchsorted(_MIDPOINTS, size, side="left")
    above = np.searchsorted(_MIDPOINTS, size, side="right")
    code = np.where(below % 2 == 0, below, above)  # they differ on a midpoint only
    code = np.where(np.signbit(values), code + 128, code)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def floats_from_bytes(raw: bytes, dtype: str) -> np.ndarray:
    """float32 values of packed float32, float16 or bfloat16 elements."""
    if dtype == "float32":
        return np.frombuffer(raw, dtype="<f4")
    if dtype == "float16":
        with np.errstate(invalid="ignore"):
            return np.frombuffer(raw, dtype="<f2").astype(np.float32)
    widened = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
    return widened.view(np.float32)


ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}

# ---- one layer's cache ----

GUARD_BYTES = 64  # before and after the cache, nobody's


class CacheModel:
    """One layer's K and V somewhere in a byte array, with guard bytes around them."""

    def __init__(
        self, memory: bytes, layout: str, pages: int, tokens: int, heads: int, dim: int, dtype: str
    ):
        self.memory = bytearray(memory)
        self.pages, self.tokens, self.heads, self.dtype = pages, tokens, heads, dtype
        self.run = run = dim * ELEMENT_BYTES[dtype]  # bytes of one head of one row
        start, row = GUARD_BYTES, heads * run
        # (K base, V base, page distance, token distance, head distance), in bytes
        table = {
            "separate": (start, start + pages * tokens * row, tokens * row, row, run),
            "pages_2": (start, start + tokens * row, 2 * tokens * row, row, run),
            "head_major": (start, start + pages * tokens * row, tokens * row, run, tokens * run),
            "packed": (start, start + run, 2 * tokens * row, 2 * run, 2 * tokens * run),
            "padded": (start, start + 2 * row, tokens * 4 * row, 4 * row, run),
        }
        table["two_pages"] = table["separate"]
        self.key_base, self.value_base, self.page_step, self.token_step, self.head_step = table[
            layout
        ]
        self.k_scale: list[float] | None = None
        self.v_scale: list[float] | None = None

    @staticmethod
    def memory_bytes(layout: str, pages: int, tokens: int, heads: int, dim: int, dtype: str) -> int:
        rows = pages * tokens * heads * dim * ELEMENT_BYTES[dtype]
        return 2 * GUARD_BYTES + rows * (4 if layout == "padded" else 2)

    @property
    def num_slots(self) -> int:
        return self.pages * self.tokens

    def encode(self, raw: bytes, row_dtype: str, scale: list[float] | None) -> bytes:
        """One row's K or V as the cache stores it."""
        if row_dtype == self.dtype:
            return raw
        values = floats_from_bytes(raw, row_dtype).reshape(self.heads, -1)
        if scale is not None:  # one for all heads or one each
            with np.errstate(all="ignore"):
                values = values / np.array(scale, dtype=np.float32)[:, None]
        return e4m3_codes(values).tobytes()

    def put(self, slot: int, key: bytes, value: bytes, row_dtype: str) -> None:
        page, token = divmod(slot, self.tokens)
        for base, raw, scale in (
            (self.key_base, key, self.k_scale),
            (self.value_base, value, self.v_scale),
        ):
            stored = self.encode(raw, row_dtype, scale)
            at = base + page * self.page_step + token * self.token_step
            for head in range(self.heads):
                run = stored[head * self.run : (head + 1) * self.run]
                self.memory[at : at + self.run] = run
                at += self.head_step


# ---- the interceptor ----


class InterceptorModel:
    """What a round does to the caches: direct rows at once, drafts when they are committed."""

    def __init__(self, caches: dict[str, CacheModel], groups: dict[str, int], row_dtype: str):
        self.caches, self.groups, self.row_dtype = caches, groups, row_dtype
        self.parent: dict[int, int] = {}  # draft row -> row it hangs on
        self.first_row: list[int] = []
        self.staged: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        self.slot_of: dict[tuple[int, int], int] = {}  # (group, row) -> slot
        self.staging = False
        self.counts = {
            "rounds": 0,
            "aborted_rounds": 0,
            "staged_tokens": 0,
            "committed_tokens": 0,
            "rejected_tokens": 0,
            "failed_tokens": 0,
        }
        self.committed_rows: set[int] = set()

    def begin(
        self, query_lens: list[int], num_drafts: list[int], parents: list[list[int]], staging: bool
    ) -> None:
        self.parent, self.first_row, self.staged, self.slot_of = {}, [], {}, {}
        self.committed_rows = set()
        self.staging = staging
        row = 0
        for b, (rows, drafts) in enumerate(zip(query_lens, num_drafts, strict=True)):
            self.first_row.append(row)
            for i in range(rows - drafts, rows):
                hangs_on = parents[b][i - rows + drafts] if parents and parents[b] else i - 1
                self.parent[row + i] = row + hangs_on
            row += rows

    def write(
        self, layer: str, rows: list[int], keys: list[bytes], values: list[bytes], slots: list[int]
    ) -> None:
        for row, key, value, slot in zip(rows, keys, values, slots, strict=True):
            if self.staging and row in self.parent:
                self.staged[layer, row] = (key, value)
                self.slot_of[self.groups[layer], row] = slot
            elif slot >= 0:
                self.caches[layer].put(slot, key, value, self.row_dtype)

    def commit(self, accepted: list[list[int]], slots: dict[int, list[list[int]]] | None) -> None:
        """accepted[b]: rows of the batch; slots[group][b]: where to, or None: as written."""
        for b, rows in enumerate(accepted):
            for i, row in enumerate(rows):
                self.committed_rows.add(row)
                for layer, cache in self.caches.items():
                    group = self.groups[layer]
                    slot = self.slot_of[group, row] if slots is None else slots[group][b][i]
                    key, value = self.staged[layer, row]
                    cache.put(slot, key, value, self.row_dtype)

    def end(self, aborted: bool, failed: bool = False) -> None:
        """`failed`: the round's commit was refused."""
        self.counts["rounds"] += 1
        self.counts["aborted_rounds"] += aborted
        if self.staging:
            staged = len({row for _, row in self.staged})
            self.counts["staged_tokens"] += staged
            self.counts["committed_tokens"] += len(self.committed_rows)
            rest = "failed_tokens" if failed else "rejected_tokens"
            self.counts[rest] += staged - len(self.committed_rows)
        self.staging = False
