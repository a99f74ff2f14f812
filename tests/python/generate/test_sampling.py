"""Sampling through a Generator: distributions, seeds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from generate.tiny_models import VOCAB, Oracle, decode_plainly, tiny
from nwor_specpv import SpecPVConfig
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.drafters.ngram import NgramDrafter
from nwor_specpv.transformers import Generator
from specpv.contexts import seeded

PROMPT = [3, 14, 15, 92, 65]


def drafter(rng: random.Random) -> Oracle:
    return Oracle({tuple(PROMPT): decode_plainly(tiny(), PROMPT, 40)}, rng)


def test_the_same_seed_gives_the_same_text_whatever_is_beside_it() -> None:
    texts = []
    for batch in ([PROMPT], [PROMPT, [1, 2, 3, 4]]):
        generator = Generator(tiny(), drafter=drafter(random.Random(7)))
        tree = TreeConfig(rows=1, depth=1, top_k=1)
        result = generator.generate(batch, 20, temperature=0.9, top_p=0.95, seed=5, tree=tree)
        texts.append(result.token_ids[0])
    assert texts[0] == texts[1]
    other = Generator(tiny(), drafter=drafter(random.Random(7)))
    assert other.generate([PROMPT], 20, temperature=0.9, seed=6).token_ids[0] != texts[0]
    again = [
        Generator(tiny(), drafter=drafter(random.Random(7))).generate(
            PROMPT, 20, temperature=0.9, seed=6
        )
        for _ in range(2)
    ]
    assert again[0].token_ids == again[1].token_ids
    assert again[0].stats.seed == 6


def test_seeds_are_alike_beside_others_and_with_drafts() -> None:
    """A drafter that looks at its own request only, trees, and seeds at the end of their range."""
    generator = Generator(tiny(), drafter=NgramDrafter(min_tokens=1))
    prompts = [list(range(VOCAB)), list(range(VOCAB))[::-1], list(range(0, VOCAB, 2))]
    for seed in (5, -1, 2**63 - 1, 2**64 - 1, 2**70):
        batch = generator.generate(prompts, 20, temperature=0.9, seed=seed)
        assert batch.stats.drafts > 0
        for index, prompt in enumerate(prompts):
            alone = generator.generate(prompt, 20, temperature=0.9, seed=seed + index)
            assert alone.token_ids == batch.token_ids[index]


@torch.no_grad()
def exact_distribution(temperature: float, top_k: int) -> dict[tuple[int, int], float]:
    """Of the first two tokens, from the model's own logits in float64."""
    model = tiny()

    def following(tokens: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        kept = logits >= logits.topk(top_k).values[-1]
        return (logits / temperature).masked_fill(~kept, -torch.inf).softmax(-1)

    first = following(PROMPT)
    found = {}
    for a in first.nonzero().flatten().tolist():
        second = following([*PROMPT, a])
        for b in second.nonzero().flatten().tolist():
            found[a, b] = float(first[a] * second[b])
    return found


@pytest.mark.parametrize("mode", ["tree", "lossless"])
def test_two_tokens_are_distributed_as_the_model_says(mode: str) -> None:
    """Chi-square over the pairs that top-k leaves. A wrong sampler fails by orders of magnitude."""
    rng = seeded()
    temperature, top_k, rounds = 0.7, 3, 40
    expected = exact_distribution(temperature, top_k)
    specpv = None
    if mode == "lossless":
        specpv = SpecPVConfig(
            enable_specpv=True,
            specpv_rectify="lossless",
            specpv_block_size=2,
            specpv_n_sink_blocks=0,
            specpv_n_retrieval_blocks=0,
            specpv_n_window_blocks=1,
            specpv_selector="sliding",
            specpv_n_spec_tokens_buf=4,
        )
    generator = Generator(tiny(), drafter=drafter(rng), specpv=specpv, page_size=4)
    tree = TreeConfig(rows=5, depth=2, top_k=2)
    counts: Counter[tuple[int, ...]] = Counter()
    for base in range(0, rounds * 16, 16):
        batch = generator.generate(
            [PROMPT] * 16, 4, temperature=temperature, top_k=top_k, seed=base, tree=tree
        )
        for ids in batch.token_ids:
            counts[tuple(ids[:2])] += 1
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    chi = sum(
        (counts[pair] - total * p) ** 2 / (total * p)
        for pair, p in expected.items()
        if total * p >= 1
    )
    # Eight degrees of freedom at most: beyond 40 happens once in a million.
    assert chi < 40, (chi, counts, expected)
    assert len(expected) == 9
