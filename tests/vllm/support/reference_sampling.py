"""What model runner V2's sampling kernels compute, for whole batches at once, without Triton.

Drafts are drawn by adding Gumbel noise to logits; the noise follows from a request's seed and a
row's position, in the way of the installed version. Written from the definitions (Philox 4x32-10,
MurmurHash3, Gumbel-max, rejection sampling); `test_runner_v2.py` compares it with vLLM's own
kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.installed import ADAPTER

# From 0.32 on noise comes from a hash, that of drafts is another one, and logits are kept as they
# are before temperature.
HASHED = "is_drafting" in ADAPTER.sample.parameters
_DRAFTING = 1 << 30

_MASK = np.uint64(0xFFFFFFFF)


def philox(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """The first word of Philox 4x32 with ten rounds; key and counter are uint64."""
    low, high = key & _MASK, key >> np.uint64(32)
    c = [counter & _MASK, counter >> np.uint64(32), np.uint64(0) * counter, np.uint64(0) * counter]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ low,
            b & _MASK,
            (a >> np.uint64(32)) ^ c[3] ^ high,
            a & _MASK,
        ]
        low = (low + np.uint64(0x9E3779B9)) & _MASK
        high = (high + np.uint64(0xBB67AE85)) & _MASK
    return c[0]


def uniform(words: np.ndarray) -> np.ndarray:
    """A number in (0, 1) from each word, in float32."""
    signed = words.astype(np.uint32).view(np.int32)
    positive = np.where(signed < 0, -signed - 1, signed)
    drawn = positive.astype(np.float32) * np.float32(4.6566127342e-10)
    return np.maximum(drawn, np.float32(4.6566127342e-10))


def murmur(seeds: np.ndarray, positions: np.ndarray, words: int) -> np.ndarray:
    """[rows, words]: MurmurHash3 of two words of the seed, the position and the column."""

    def rotated(value: np.ndarray, by: int) -> np.ndarray:
        return ((value << np.uint64(by)) | (value >> np.uint64(32 - by))) & _MASK

    def mixed(state: np.ndarray, key: np.ndarray) -> np.ndarray:
        key = rotated(key * np.uint64(0xCC9E2D51) & _MASK, 15) * np.uint64(0x1B873593) & _MASK
        return (rotated(state ^ key, 13) * np.uint64(5) + np.uint64(0xE6546B64)) & _MASK

    state = mixed(np.zeros_like(seeds), seeds & _MASK)
    state = mixed(mixed(state, seeds >> np.uint64(32)), positions & _MASK)
    state = mixed(state[:, None], np.arange(words, dtype=np.uint64)[None]) ^ np.uint64(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor) & _MASK
    return state


def noise(
    seeds: torch.Tensor, positions: torch.Tensor, words: int, *, drafting: bool = False
) -> torch.Tensor:
    """[rows, words] float64: Gumbel noise of every row. `drafting`: of a draft."""
    if HASHED:
        places = positions.numpy().astype(np.uint64) + np.uint64(_DRAFTING * drafting)
        drawn = (murmur(seeds.numpy().view(np.uint64), places, words) + 0.5) * 2.0**-32
        return torch.from_numpy(-np.log(-np.log1p(-drawn)))
    keys = philox(seeds.numpy().view(np.uint64), positions.numpy().astype(np.uint64))
    columns = np.arange(words, dtype=np.uint64)
    drawn = uniform(philox(np.repeat(keys[:, None], words, 1), np.tile(columns, (len(keys), 1))))
    return torch.from_numpy(-np.log(-np.log1p(-drawn.astype(np.float64))))


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool = True,
    use_fp64: bool = False,
    **kept: torch.Tensor,
) -> torch.Tensor:
    """Called as vLLM's own. `kept`: see `keeping`."""
    assert set(kept) <= set(ADAPTER.sample.parameters)
    requests = expanded_idx_mapping.long()
    real = requests >= 0
    heat = torch.where(real, temperature[requests.clamp(min=0)], 0.0)[:, None]
    scores = logits.float()
    if apply_temperature:
        scores = torch.where(heat > 0, scores / heat.where(heat > 0, torch.ones(1)), scores)
    if kept:
        told, columns = kept.values()
        columns = columns.long().expand(len(requests))
        told[requests[real], columns[real]] = (logits if HASHED else scores)[real]
    own = torch.where(real, seed[requests.clamp(min=0)], 0)
    drawn = noise(own, pos, scores.shape[1], drafting=is_drafting)
    return (scores.double() + drawn * (heat > 0)).argmax(1)


def keeping(told: torch.Tensor, columns: torch.Tensor) -> dict[str, Any]:
    """Arguments of vLLM's sampling that have it keep the logits of drafts."""
    if HASHED:
        return {"is_drafting": True, "logits_cache": told, "logits_cache_col": columns}
    return {"output_processed_logits": told, "output_processed_logits_col": columns}


def verify(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    drafts: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a full step samples at temperature 1: tokens [B, drafts + 1], how many of them count.

    target_logits [B, drafts + 1, words], draft_logits and drafts [B, drafts(, words)], positions
    [B, drafts + 1] of the rows.
    """
    batch, count = drafts.shape
    wanted, offered = target_logits.double().softmax(2), draft_logits.double().softmax(2)
    coins = uniform(
        philox(
            np.repeat(seeds.numpy().view(np.uint64)[:, None], count, 1),
            positions[:, :count].numpy().astype(np.uint64),
        )
    )
    chosen = drafts[:, :, None]
    ratio = wanted[:, :count].gather(2, chosen) / offered.gather(2, chosen)
    accepted = (torch.from_numpy(coins).double() < ratio[:, :, 0]).long().cumprod(1).sum(1)
    rest = (wanted[:, :count] - offered).clamp(min=0)
    rest = torch.cat((rest, wanted[:, count:]), 1)  # behind the last draft: what is wanted
    rows = torch.arange(batch)
    drawn = noise(seeds, positions[rows, accepted], wanted.shape[2])
    token = (rest[rows, accepted].log() + drawn).argmax(1)
    out = torch.cat((drafts, torch.zeros(batch, 1, dtype=torch.int64)), 1)
    out[rows, accepted] = token
    return out, accepted + 1
