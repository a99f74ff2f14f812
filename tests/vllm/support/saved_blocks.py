"""What a KV connector has saved, compared with K/V that one plain step computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from support.engines import DIRECT, drive, greedy, own_engine, start
from support.installed import PAGE
from support.prefix_cache_blocks import scheduler_of

POISON = 12345.0  # of places that nobody has written

# K/V of a block, by layer.
Block = dict[str, torch.Tensor]


def poison() -> None:
    """Fills the caches of all layers. REQUIRES: no step has run."""
    for layer in own_engine().layers.values():
        layer.kv_cache.fill_(POISON)


def reference_blocks(texts: Sequence[Sequence[int]]) -> dict[tuple[int, int], Block]:
    """Whole blocks of each text, by text and place, from an engine that only reads prompts."""
    found = {}
    for number, text in enumerate(texts):
        llm = start(DIRECT)
        drive(llm, [text], greedy(9), max_steps=1)
        scheduler = scheduler_of(llm)
        (request,) = scheduler.requests
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request)
        caches = {name: own_engine().layers[name].kv_cache for name in own_engine().own_layers}
        for place in range(len(text) // PAGE):
            found[number, place] = {
                name: cache[blocks[place]].clone() for name, cache in caches.items()
            }
    return found


def places_of(
    saved: Sequence[Block], expected: dict[tuple[int, int], Block]
) -> set[tuple[int, int]]:
    """Which of the expected blocks were saved. Every saved one has to be one of them."""
    found = set()
    for number, block in enumerate(saved):
        assert not any((kept == POISON).any() for kept in block.values()), (
            f"block {number} has places that nobody has written"
        )
        same = [
            place
            for place, wanted in expected.items()
            if all(torch.allclose(block[name], wanted[name], atol=1e-4) for name in wanted)
        ]
        assert same, f"block {number} is no block of a text"
        found.update(same)
    return found
