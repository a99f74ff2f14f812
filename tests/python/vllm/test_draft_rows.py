"""Which rows are drafts and which of them were accepted, without vLLM."""

from __future__ import annotations

import os
import random

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.vllm import draft_rows

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))


def test_query_lens_are_differences() -> None:
    assert draft_rows.query_lens(torch.tensor([0, 5, 6, 6, 99]), 3) == [5, 1, 0]
    assert draft_rows.query_lens(torch.tensor([0]), 0) == []


def test_drafts_come_from_the_scheduler() -> None:
    assert draft_rows.drafts_of_batch([5, 1, 7, 3], [[9, 9, 9, 9], [], [-1, -1]]) == [4, 0, 2, 0]


def test_padding_and_surplus_entries_have_no_drafts() -> None:
    assert draft_rows.drafts_of_batch([2, 0, 0], [[7], [], [], [8, 8]]) == [1, 0, 0]


def test_a_request_of_drafts_only_is_refused() -> None:
    with pytest.raises(NworError, match="request 1 has 3 drafts in 3 rows"):
        draft_rows.drafts_of_batch([4, 3], [[1], [1, 2, 3]])


def test_decodes_draft_all_but_their_first_row() -> None:
    assert draft_rows.drafts_of_decodes([5, 1, 64, 0], [False, False, True, False]) == [4, 0, 0, 0]


def test_padding_stands_last() -> None:
    assert draft_rows.without_padding([5, 5, 0, 0]) == 2
    assert draft_rows.without_padding([5, 0, 1]) == 3
    assert draft_rows.without_padding([0, 0]) == 0


@pytest.mark.parametrize(
    ("lens", "drafts", "expected"),
    [
        ([5, 5, 5], [4, 4, 4], 3),  # uniform
        ([5, 5, 0], [4, 4, 0], 3),  # uniform with padding: a graph was captured for three
        ([5, 5], [0, 0], 2),  # uniform, no drafts: the graph would be replayed all the same
        ([5, 3, 40], [4, 2, 0], 2),  # a prefill behind
        ([1, 3, 1, 40], [0, 2, 0, 0], 2),
        ([1, 3, 1, 0], [0, 2, 0, 0], 2),
        ([1, 3, 0], [0, 2, 0], 3),
        ([1, 1, 0], [0, 0, 0], 0),  # nothing to verify
        ([40], [0], 0),
    ],
)
def test_requests_that_verify(lens: list[int], drafts: list[int], expected: int) -> None:
    assert draft_rows.verify_requests(lens, drafts, uniform_rows=5) == expected


def test_accepted_rows_against_lists() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for _ in range(200):
        depth = rng.randint(1, 6)
        requests = rng.randint(1, 7)
        drafts = [rng.randint(0, depth) for _ in range(requests)]
        lens = [d + 1 + rng.randint(0, 3) for d in drafts]
        emitted = [rng.randint(1, d + 1) for d in drafts]
        sampled = [[rng.randint(0, 99)] * count + [-1] * (depth + 1 - count) for count in emitted]
        num_drafts = torch.tensor(drafts, dtype=torch.int32)
        counts = draft_rows.accepted_by_tokens(torch.tensor(sampled), num_drafts)
        assert counts.dtype == torch.int32
        assert counts.tolist() == [count - 1 for count in emitted]
        rejected = torch.tensor([d + 1 - count for d, count in zip(drafts, emitted, strict=True)])
        assert draft_rows.accepted_by_rejections(rejected, num_drafts).tolist() == counts.tolist()

        told, rows_of = draft_rows.draft_path(lens, drafts)
        assert told == drafts
        depth = max(1, *drafts)
        path = draft_rows.accepted_path(torch.tensor(rows_of, dtype=torch.int32), counts)
        assert path.dtype == torch.int32
        assert path.shape == (requests, depth)
        for b, row in enumerate(path.tolist()):
            wanted = list(range(lens[b] - drafts[b], lens[b]))[: emitted[b] - 1]
            assert row == wanted + [-1] * (depth - len(wanted))


def test_tokens_of_an_unfinished_prefill_accept_nothing() -> None:
    sampled = torch.tensor([[5, -1], [5, 6], [-1, -1]])
    counts = draft_rows.accepted_by_tokens(sampled, torch.tensor([0, 0, 1], dtype=torch.int32))
    assert counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("requests", "depth", "limit", "expected"),
    [
        (4, 3, 8192, [(0, 3)]),
        (4, 5, 8, [(0, 2), (2, 4), (4, 5)]),
        (4, 2, 1, [(0, 1), (1, 2)]),
        (0, 1, 8192, [(0, 1)]),
    ],
)
def test_chunks_cover_the_depth(
    requests: int, depth: int, limit: int, expected: list[tuple[int, int]]
) -> None:
    assert draft_rows.chunk_depths(requests, depth, limit) == expected
