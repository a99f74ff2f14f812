"""How finely FlashAttention-3 cuts what the rows of a step attend to. Pure functions.

Its planner gives every SM one piece of work: it cuts each prefix into so many pieces that all of
them together are about as many as there are SMs. Requests times KV heads beyond that number are
not cut at all, and then they come in waves: 24 requests with 8 KV heads are 192 pieces, of which
132 SMs do 132 in a first wave while the second leaves half of them idle. Pieces are handed out to
SMs as these become free, so finer ones fill the waves. The planner has no option for it, but it
cuts finer when it is told of more SMs than there are.

The costs below are estimates, from counting waves; benchmarks/vllm/prefix_schedule.py times cuts.
"""

from __future__ import annotations

import functools
import math

BLOCK = 128  # tokens that a piece advances by
# Packed rows of a request, rows times query heads per KV head, that are one piece: few, or more.
FEW_ROWS, WIDE_CHANNELS = 64, 96  # beyond so many channels a piece has fewer rows
NARROW_ROWS, WIDE_ROWS = 192, 128
MARGIN = 1.1  # the planner's own
# Costs in blocks: beginning and ending a piece; merging what was cut, once and by piece and row.
PIECE_COST, MERGE_COST, MERGE_ROW_COST = 1.0, 1.0, 0.0025
LEAST_BLOCKS = 24  # of the planner's pieces: shorter ones end before it matters
MOST_FINER = 4  # times as many pieces as the planner would make
WORTH = 0.95  # a share of the planner's own cost that is worth another way


def pieces_of_rows(packed: int, head_dim: int) -> int:
    """Pieces that so many packed rows of a request and KV head are, before prefixes are cut."""
    if packed <= FEW_ROWS:
        return 1
    return math.ceil(packed / (NARROW_ROWS if head_dim <= WIDE_CHANNELS else WIDE_ROWS))


def pretended_sms(
    tokens: int, num_requests: int, num_rows: int, pieces: int, num_sms: int, max_splits: int
) -> int:
    """Number of SMs to tell the planner of, for prefixes of so many tokens all together, each of
    which is so many pieces before it is cut: KV heads times `pieces_of_rows`.

    `num_sms` itself where its own way is as good as any, within what can be known here: prefixes
    are taken to be of one length.
    """
    blocks = math.ceil(tokens / max(1, num_requests) / BLOCK)
    return _pretended_sms(blocks, num_requests, num_rows, pieces, num_sms, max_splits)


@functools.lru_cache(maxsize=4096)
def _pretended_sms(
    blocks: int, num_requests: int, num_rows: int, uncut: int, num_sms: int, max_splits: int
) -> int:
    if blocks == 0 or num_requests == 0 or max_splits <= 1:
        return num_sms
    work = MARGIN * blocks * num_requests * uncut

    def cost(pieces: int) -> float:
        waves = math.ceil(num_requests * uncut * pieces / num_sms)
        merging = MERGE_COST + MERGE_ROW_COST * pieces * num_rows if pieces > 1 else 0.0
        return waves * (math.ceil(blocks / pieces) + PIECE_COST) + merging

    own = min(max_splits, math.ceil(blocks / math.ceil(work / num_sms)))
    if math.ceil(blocks / own) < LEAST_BLOCKS:
        return num_sms
    most = min(max_splits, blocks, MOST_FINER * own)
    best = min(range(own, max(own, most) + 1), key=cost)
    if cost(best) > WORTH * cost(own):
        return num_sms
    each = math.ceil(blocks / best)
    # A little more than a piece, so that a prefix some tokens longer is not cut once more.
    return max(num_sms, math.floor(work / (each + each // 16)))
