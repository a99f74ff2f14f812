"""Plays rounds of one interceptor and keeps books of its own about them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from nwor_specpv import Interceptor, NworConfig, RoundPlan

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 2, 2, 64
PAGES, PAGE_SIZE = 8, 16
BYTES_PER_TOKEN = 2 * NUM_LAYERS * NUM_HEADS * HEAD_SIZE * 4  # K and V, float32


@dataclass
class Books:
    rounds: int = 0
    aborted: int = 0
    stage_operations: int = 0
    staged: int = 0
    committed: int = 0
    direct: int = 0

    def metrics(self) -> dict[str, int]:
        rejected = self.staged - self.committed
        return {
            "nwor_rounds_total": self.rounds,
            "nwor_aborted_rounds_total": self.aborted,
            "nwor_stage_operations_total": self.stage_operations,
            "nwor_staged_tokens_total": self.staged,
            "nwor_committed_tokens_total": self.committed,
            "nwor_rejected_tokens_total": rejected,
            "nwor_cache_bytes_written_total": (self.direct + self.committed) * BYTES_PER_TOKEN,
            "nwor_cache_bytes_avoided_total": rejected * BYTES_PER_TOKEN,
            "nwor_contract_violations_total": 0,
            "nwor_commit_seconds_count": self.rounds - self.aborted,
        }


def play(num_rounds: int, seed: int, config: NworConfig | None = None) -> tuple[Interceptor, Books]:
    """Chains of random length, accepted up to a random depth; every fourth round is aborted."""
    chance = random.Random(seed)
    interceptor = Interceptor(config or NworConfig())
    names = [f"layer.{i}" for i in range(NUM_LAYERS)]
    for name in names:
        shape = (PAGES, PAGE_SIZE, NUM_HEADS, HEAD_SIZE)
        interceptor.bind_layer(name, torch.zeros(shape), torch.zeros(shape))
    books = Books()
    for index in range(num_rounds):
        drafts = chance.randint(1, 7)
        rows = 1 + drafts
        interceptor.begin(RoundPlan([rows], [drafts]))
        slots = torch.tensor(chance.sample(range(PAGES * PAGE_SIZE), rows))
        for name in names:
            key = torch.full((rows, NUM_HEADS, HEAD_SIZE), float(index))
            interceptor.write(name, key, -key, slots)
        books.rounds += 1
        books.staged += drafts
        books.direct += 1
        books.stage_operations += NUM_LAYERS
        if index % 4 == 3:
            interceptor.abort()
            books.aborted += 1
            continue
        accepted = chance.randint(0, drafts)
        path = torch.tensor([[*range(1, 1 + accepted), *[-1] * (drafts - accepted)]])
        interceptor.commit(path.int(), torch.tensor([accepted], dtype=torch.int32))
        books.committed += accepted
    return interceptor, books
