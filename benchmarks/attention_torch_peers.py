"""Peers inside torch: what attention costs that takes any mask, and LibTorch's FlashAttention-2.

They get contiguous K/V for free, prefix and in-flight rows in one piece, made when a set is first
seen. Only shapes of the section `torch`: compiling flex attention takes a while for each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attention_inputs import HEADS, KV_HEADS, PAGE, Bench, Set
from torch.nn.functional import scaled_dot_product_attention

GROUP = HEADS // KV_HEADS


class Contiguous:
    """K and V of the sets of one case, [B, Hkv, L + rows, D], and what each row sees."""

    def __init__(self) -> None:
        self._of: dict[Set, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, bench: Bench, s: Set) -> tuple[torch.Tensor, torch.Tensor]:
        case = bench.case
        if case.section != "torch":
            raise NotImplementedError("shapes of the section torch only")
        if s not in self._of:
            if self._of.keys() - set(bench.sets):  # of another case
                self._of.clear()
            at = torch.arange(case.lens[0] + case.rows, device=s.table.device)
            pages = s.table[:, at // PAGE].long()
            both = (cache[pages, at % PAGE] for cache in (bench.pool.keys, bench.pool.values))
            keys, values = (tokens.transpose(1, 2).contiguous() for tokens in both)
            self._of[s] = keys, values
        return self._of[s]


def rows_seen(bench: Bench) -> torch.Tensor:
    """[B, rows, rows]: in-flight rows that a row of a tree sees."""
    rows = bench.case.rows
    j = torch.arange(rows, device=bench.tree.device)
    return (bench.tree[:, j // 64] >> (j % 64) & 1).bool().view(-1, rows, rows)


def sdpa() -> Callable[[Bench, Set], torch.Tensor]:
    """With a boolean mask. Rows are folded into the KV head's group: it reads K and V once."""
    contiguous, masks = Contiguous(), {}

    def run(bench: Bench, s: Set) -> torch.Tensor:
        keys, values = contiguous.get(bench, s)
        batch, rows, length = len(bench.case.lens), bench.case.rows, bench.case.lens[0]
        if bench not in masks:
            masks.clear()
            seen = rows_seen(bench)
            seen = torch.cat([seen.new_ones(batch, rows, length), seen], 2)
            masks[bench] = seen.repeat_interleave(GROUP, 1).unsqueeze(1)
        query = s.query.view(batch, rows, KV_HEADS, GROUP, -1).transpose(1, 2).flatten(2, 3)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=masks[bench])
        unfolded = out.view(batch, KV_HEADS, rows, GROUP, -1).transpose(1, 2)
        s.out.view(unfolded.shape).copy_(unfolded)
        return s.out

    return run


def flex() -> Callable[[Bench, Set], torch.Tensor]:
    """Compiled, with a block mask made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    contiguous, masks = Contiguous(), {}
    torch._dynamo.config.cache_size_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)

    def block_mask(bench: Bench) -> object:
        length, rows = bench.case.lens[0], bench.case.rows
        seen = rows_seen(bench)

        def sees(b, _, row, token):
            return (token < length) | seen[b, row, (token - length).clamp(min=0)]

        device = seen.device.type
        return create_block_mask(sees, len(bench.case.lens), None, rows, length + rows, device)

    def run(bench: Bench, s: Set) -> torch.Tensor:
        keys, values = contiguous.get(bench, s)
        batch, rows = len(bench.case.lens), bench.case.rows
        if bench not in masks:
            masks.clear()
            masks[bench] = block_mask(bench)
        query = s.query.view(batch, rows, HEADS, -1).transpose(1, 2)
        out = compiled(query, keys, values, block_mask=masks[bench], enable_gqa=True)
        s.out.view(batch, rows, HEADS, -1).copy_(out.transpose(1, 2))
        return s.out

    return run


def flash_attention_2() -> Callable[[Bench, Set], torch.Tensor]:
    """LibTorch's, as it is called for a chain: rows are not folded."""
    contiguous = Contiguous()

    def run(bench: Bench, s: Set) -> torch.Tensor:
        keys, values = contiguous.get(bench, s)
        case, batch = bench.case, len(bench.case.lens)
        length = case.lens[0] + case.rows
        found = torch.ops.aten._flash_attention_forward(
            s.query.view(batch, case.rows, HEADS, -1),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            None,
            None,
            case.rows,
            length,
            0.0,
            True,
            False,
            scale=case.head_dim**-0.5,
        )
        return found[0].flatten(0, 1)

    return run
