"""Rows of a step: which are drafts, which of them were accepted. Pure functions.

Request b has `query_lens[b]` rows; its last `num_drafts[b]` are drafts. The row before them is its
root: the last emitted token, or the last of a prefill chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nwor_specpv.errors import NworError


def query_lens(query_start: torch.Tensor, num_requests: int) -> list[int]:
    """Rows of each request from the running sum on the host."""
    return query_start[: num_requests + 1].diff().tolist()


def drafts_of_batch(lens: Sequence[int], scheduled: Sequence[Sequence[int]]) -> list[int]:
    """Draft rows of each request from the scheduler's draft tokens (model runner V1).

    Requests of a padded batch beyond the scheduler's have none.
    """
    counts = [len(tokens) for tokens in scheduled[: len(lens)]]
    counts += [0] * (len(lens) - len(counts))
    for request, (count, length) in enumerate(zip(counts, lens, strict=True)):
        if count and count >= length:
            raise NworError(
                f"drafts: request {request} has {count} drafts in {length} rows, but its first row "
                "is never a draft"
            )
    return counts


def drafts_of_decodes(
    lens: Sequence[int], prefilling: Sequence[bool], scheduled: Sequence[int] | None = None
) -> list[int]:
    """Draft rows of each request where all but the first row of a decode are drafts (runner V2).

    A prompt's last token may have drafts behind it, which only fill the batch up and are always
    rejected. `scheduled` says how many drafts the requests of the step have; None: nobody knows,
    and then rows of prompts are taken for tokens.
    """
    found = [
        max(0, length - 1) if not busy else 0 for length, busy in zip(lens, prefilling, strict=True)
    ]
    for request, number in enumerate(scheduled or ()):
        if request < len(lens) and prefilling[request] and 0 < number < lens[request]:
            found[request] = number
    return found


def without_padding(lens: Sequence[int]) -> int:
    """Requests before those that only fill a batch up: they have no rows and stand last."""
    count = len(lens)
    while count and lens[count - 1] == 0:
        count -= 1
    return count


def verify_requests(lens: Sequence[int], drafts: Sequence[int], uniform_rows: int) -> int:
    """How many requests at the front of the batch take the way of those that verify drafts.

    All up to the last that has drafts. In a batch whose requests all have `uniform_rows` rows it is
    all of them, padding included, drafts or not: a graph captured for it knows no other way.
    """
    if any(lens) and {0, uniform_rows}.issuperset(lens):
        return len(lens)
    count = next((b for b in range(len(drafts), 0, -1) if drafts[b - 1]), 0)
    return len(lens) if not any(lens[count:]) and count else count


def accepted_by_tokens(sampled: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """Accepted drafts of each request: its sampled tokens [B, 1 + K], -1 padded, but for the last.

    What is sampled for an unfinished prefill is thrown away by the engine; it has no drafts, so
    nothing of it counts.
    """
    emitted = (sampled != -1).sum(dim=1, dtype=torch.int32)
    return torch.minimum((emitted - 1).clamp_(min=0), num_drafts)


def accepted_by_rejections(num_rejected: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """Accepted drafts of each request from the rejected ones."""
    return (num_drafts - num_rejected.to(torch.int32)).clamp_(min=0)


def draft_path(lens: Sequence[int], drafts: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Drafts of each request, and rows of the request from its first draft on, `depth` of them.

    `depth` is that of the request with most drafts, at least 1; entries beyond a request's drafts
    name no draft, and nobody accepts them.
    """
    depth = max(1, max(drafts, default=0))
    path = [
        list(range(length - count, length - count + depth))
        for length, count in zip(lens, drafts, strict=True)
    ]
    return list(drafts), path


def accepted_path(path: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[B, depth]: the first `counts[b]` entries of each request's path, -1 padded."""
    steps = torch.arange(path.shape[1], dtype=torch.int32, device=counts.device)
    return path.masked_fill(steps >= counts[:, None], -1)


def chunk_depths(num_requests: int, depth: int, max_entries: int) -> list[tuple[int, int]]:
    """Columns [begin, end) of the path per commit, so that none has more than `max_entries`."""
    width = max(1, max_entries // max(1, num_requests))
    return [(begin, min(begin + width, depth)) for begin in range(0, depth, width)]
