"""A torch.distributed group of two ranks, the other of which is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _create_work_from_future,
    _register_process_group,
    _unregister_process_group,
)
from torch.futures import Future

NAME = "made_up"
REFUSAL = [2**63 - 1] * 2
DIRECT = [0x6E776F7264697265, ~0x6E776F7264697265]  # of a round that was written directly


class OtherRank(dist.ProcessGroup):
    """Takes this rank's digests, and answers with those of a rank that says `words`."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.told: list[list[int]] = []
        self.words: list[int] | None = None  # None: the same as this rank

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> dist.Work:
        (digest,) = tensors
        self.told.append(digest.tolist())
        if self.words is not None:
            digest.copy_(torch.maximum(digest, torch.tensor(self.words).to(digest.device)))
        done: Future = Future()
        done.set_result(tensors)
        return _create_work_from_future(done)


@contextmanager
def other_rank() -> Iterator[OtherRank]:
    """Registered as NAME meanwhile."""
    group = OtherRank()
    _register_process_group(NAME, group)
    try:
        yield group
    finally:
        _unregister_process_group(NAME)
