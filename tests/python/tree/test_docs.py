"""docs/trees.md: its example is run, round after round, and decodes what plain decoding does."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

import nwor_specpv as nwor
from nwor_specpv.models.tiny_model import TinyModel, TinyTokenizer
from tests.python.models.tiny_decoding import decode_plain

PAGE = Path(__file__).resolve().parents[3] / "docs" / "trees.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
PAGE_SIZE, ROWS = 16, 8


def drafter(truth: list[int], rng: random.Random):
    """Three steps of the best two: mostly right about what comes, sometimes not."""
    tokens, scores, kept, base = [], [], [], 0
    standing = [(1.0, True)]  # score, and whether the text so far is the true one
    for step in range(3):
        ids, values, true = [], [], []
        for score, on_track in standing:
            right = rng.randrange(2) if on_track and rng.random() < 0.8 else -1
            for child in range(2):
                hit = child == right and step < len(truth)
                ids.append(truth[step] if hit else rng.randrange(3, 500))
                values.append(score * (0.6 if hit else 0.3))
                true.append(hit)
        order = sorted(range(len(ids)), key=lambda i: (-values[i], i))[:2]
        standing = [(values[i], true[i]) for i in order]
        tokens.append(torch.tensor([ids]))
        scores.append(torch.tensor([values]))
        kept.append(torch.tensor([[base + i for i in order]]))
        base += len(ids)
    return tokens, scores, kept


class World:
    """A prompt in the paged caches of the shipped model, and the names the example uses."""

    def __init__(self, prompt: list[int]) -> None:
        self.model = TinyModel()
        shape = self.model.shape
        size = (40, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        self.caches = [(torch.zeros(size), torch.zeros(size)) for _ in range(shape.num_layers)]
        self.interceptor = nwor.Interceptor(nwor.NworConfig(strict=True))
        for layer, caches in enumerate(self.caches):
            self.interceptor.bind_layer(str(layer), *caches)
        self.pages = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int()[None]
        self.scale = shape.head_dim**-0.5
        self.tokens = list(prompt)
        positions = torch.arange(len(prompt) - 1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
            places = self.slots(positions)
            for cache, rows in zip(self.caches[layer], (k, v), strict=True):
                cache.flatten(0, 1)[places] = rows
            none = torch.zeros(1, dtype=torch.int32)
            ends = torch.tensor([0, len(positions)], dtype=torch.int32)
            caches = self.caches[layer]
            return nwor.verify_attention(q, k, v, *caches, self.pages, none, ends, None, self.scale)

        self.model.forward(torch.tensor(prompt[:-1]), positions, attend)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        return self.pages[0, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE

    def names(self, drafted) -> dict:
        length = len(self.tokens) - 1  # all but the root are cached
        slots = self.slots(length + torch.arange(ROWS))
        slots[1:] = -1
        return {
            "nwor": nwor,
            "model": self.model,
            "interceptor": self.interceptor,
            "caches": self.caches,
            "pages": self.pages,
            "scale": self.scale,
            "drafted": drafted,
            "slots": slots,
            "root_tokens": torch.tensor([self.tokens[-1]]),
            "prefix_lens": torch.tensor([length], dtype=torch.int32),
            "query_start": torch.tensor([0, ROWS], dtype=torch.int32),
            "destinations": self.slots(length + 1 + torch.arange(ROWS))[None],
            "seeds": torch.tensor([5]),
            "positions": torch.tensor([length + 1]),
        }


def test_the_example_is_ten_lines() -> None:
    lines = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_example_decodes_what_plain_decoding_does() -> None:
    prompt = TinyTokenizer().encode("Once upon a time")
    truth = decode_plain(TinyModel(), prompt, 40).tokens
    world, rng, rounds = World(prompt), random.Random(3), 0
    emitted: list[int] = []
    while len(emitted) < len(truth):
        names = world.names(drafter(truth[len(emitted) :], rng))
        exec(EXAMPLES[0], names)
        assert names["receipt"].ok
        rows = names["path"][0, : int(names["counts"])].tolist()
        emitted += names["tree"].tokens[0, rows].tolist() + names["next_token"].tolist()
        world.tokens = prompt + emitted
        rounds += 1
    assert emitted[: len(truth)] == truth
    assert rounds < len(truth) / 1.5  # drafts were accepted, or this shows little


def test_the_sampling_lines_run_too() -> None:
    world = World(TinyTokenizer().encode("Once upon a time"))
    names = world.names(drafter([], random.Random(4)))
    first = EXAMPLES[0].split("path, counts, ")[0]
    exec(first + EXAMPLES[1], names)
    assert names["path"].shape == (1, ROWS)
    assert 0 <= int(names["next_token"]) < 512
    world.interceptor.abort()


@pytest.mark.parametrize("name", re.findall(r"`([a-z_]+)\(", PAGE.read_text(encoding="utf-8")))
def test_every_function_it_names_exists(name: str) -> None:
    assert hasattr(nwor, name) or hasattr(nwor.Tree, name)
