"""Keeps sequences in the cache after a call, so that later prompts do not run them again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from nwor_specpv import SlotAllocator

from .request import Request

_MOST = 8  # sequences kept, of each choice of features


@dataclass
class Kept:
    key: int
    tokens: list[int]  # tokens whose cached K/V came from full attention
    features: torch.Tensor | None
    layers: tuple[int, ...]  # layers of the features


class KeptPrefixes:
    """The most recent sequences; the oldest is dropped first.

    Sequences with features and without take no places from each other: generators that share a
    cache may need either.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    def clear(self) -> None:
        """Forgets all; their cache no longer exists."""
        self._kept.clear()

    def find(self, prompt: list[int], layers: tuple[int, ...]) -> tuple[Kept, int] | None:
        """Returns the sequence that shares the longest prefix, and the length of that prefix.

        It has features of `layers`, if there are any. The prompt's last token is always run.
        """
        best, length = None, 0
        for kept in self._kept.values():
            if layers and kept.layers != layers:
                continue
            shared = shared_length(kept.tokens, prompt, len(prompt) - 1)
            if shared > length:
                best, length = kept, shared
        if best is None:
            return None
        self._kept.move_to_end(best.key)
        return best, length

    def add(self, allocator: SlotAllocator, request: Request, layers: tuple[int, ...]) -> None:
        """Keeps the request's pages, up to what full attention has verified."""
        length = min(request.cached, len(request.tokens))
        if request.partial is not None:
            length = min(length, request.partial.full_len)
        features = None
        if layers and request.features:
            features = torch.cat(request.features)
            length = min(length, len(features))
        if length < 1:
            allocator.free(request.key)
            return
        allocator.truncate(request.key, length)
        tokens = request.tokens[:length]
        layers = () if features is None else layers
        self._kept[request.key] = Kept(request.key, tokens, features, layers)
        alike = [kept.key for kept in self._kept.values() if kept.layers == layers]
        for key in alike[:-_MOST]:
            self._drop(allocator, key)

    def make_room(self, allocator: SlotAllocator, tokens: int) -> None:
        """Drops the oldest until `tokens` slots are free, whole pages included."""
        while self._kept and allocator.stats()["free_slots"] < tokens:
            self._drop(allocator, next(iter(self._kept)))

    def _drop(self, allocator: SlotAllocator, key: int) -> None:
        del self._kept[key]
        allocator.free(key)


def take_shared(
    allocator: SlotAllocator, request: Request, others: list[Request], layers: tuple[int, ...]
) -> None:
    """Starts a request with what prompts of the same call have computed, if it has less.

    `others` have been run and have features of `layers`. The prompt's last token is always run.
    """
    most = len(request.tokens) - 1
    lengths = [shared_length(one.tokens[: one.cached], request.tokens, most) for one in others]
    length = max(lengths, default=0)
    if length <= request.cached:
        return
    source = others[lengths.index(length)]
    allocator.free(request.key)
    allocator.fork(source.key, request.key, length)
    request.cached = length
    if layers:
        request.features = [torch.cat(source.features)[:length]]


def shared_length(one: list[int], other: list[int], most: int) -> int:
    """Tokens with which both begin, `most` at most."""
    most = min(most, len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, high = 0, most  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
