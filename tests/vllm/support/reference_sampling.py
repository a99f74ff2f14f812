"""What model runner V2's sampling kernels compute, for whole batches at once, without Triton.

Drafts are drawn by adding Gumbel noise to logits; the noise follows from a request's seed and a
row's position. Written from the definitions (Philox 4x32-10, Gumbel-max, rejection sampling);
`test_runner_v2.py` compares it with vLLM's own kernels.
"""

from __future__ import annotations

import numpy as np
import torch

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


def noise(seeds: torch.Tensor, positions: torch.Tensor, words: int) -> torch.Tensor:
    """[rows, words] float64: Gumbel noise of every row."""
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
    output_processed_logits: torch.Tensor | None = None,
    output_processed_logits_col: torch.Tensor | None = None,
    use_fp64: bool = False,
) -> torch.Tensor:
    """Called as vLLM's own."""
    requests = expanded_idx_mapping.long()
    real = requests >= 0
    heat = torch.where(real, temperature[requests.clamp(min=0)], 0.0)[:, None]
    scores = logits.float()
    if apply_temperature:
        scores = torch.where(heat > 0, scores / heat.where(heat > 0, torch.ones(1)), scores)
    if output_processed_logits is not None:
        columns = output_processed_logits_col.long().expand(len(requests))
        output_processed_logits[requests[real], columns[real]] = scores[real]
    own = torch.where(real, seed[requests.clamp(min=0)], 0)
    drawn = scores.double() + noise(own, pos, scores.shape[1]) * (heat > 0)
    return drawn.argmax(1)


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
