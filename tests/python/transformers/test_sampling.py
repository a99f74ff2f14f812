"""Sampling through a Generator: distributions, seeds."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from nwor_specpv import NworError, SpecPVConfig, make_coins, tree_from_chain
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.drafters.ngram import NgramDrafter
from nwor_specpv.transformers import Generator, decoding
from nwor_specpv.transformers.calls import sampling
from tests.python.specpv.contexts import DEVICES, seeded
from tests.python.transformers.test_specpv_modes import configured
from tests.python.transformers.tiny_models import (
    FAMILIES,
    TREES,
    VOCAB,
    Oracle,
    decode_plainly,
    random_prompt,
    tiny,
)

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
    prompts = [list(range(1, VOCAB)), list(range(1, VOCAB))[::-1], list(range(2, VOCAB, 2))]
    for seed in (5, -1, 2**63 - 1, 2**64 - 1, 2**70):
        batch = generator.generate(prompts, 20, temperature=0.9, seed=seed)
        assert batch.stats.drafts > 0
        for index, prompt in enumerate(prompts):
            alone = generator.generate(prompt, 20, temperature=0.9, seed=seed + index)
            assert alone.token_ids == batch.token_ids[index]


def test_more_than_all_tokens_are_all() -> None:
    generator = Generator(tiny(), drafter="none")
    texts = [
        generator.generate(PROMPT, 20, temperature=0.9, top_k=top_k, seed=5).token_ids
        for top_k in (0, VOCAB, 2**31 - 1, 2**31, 2**70, np.int64(VOCAB))
    ]
    assert texts == texts[:1] * len(texts)


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


def short_tails() -> SpecPVConfig:
    """Lossless, from the first tokens on: a view of one block."""
    return SpecPVConfig(
        enable_specpv=True,
        specpv_mode="lossless",
        specpv_block_size=2,
        specpv_n_sink_blocks=0,
        specpv_n_retrieval_blocks=0,
        specpv_n_window_blocks=1,
        specpv_selector="sliding",
        specpv_n_spec_tokens_buf=4,
    )


@pytest.mark.parametrize("mode", ["tree", "lossless"])
def test_two_tokens_are_distributed_as_the_model_says(mode: str) -> None:
    """Chi-square over the pairs that top-k leaves. A wrong sampler fails by orders of magnitude."""
    rng = seeded()
    temperature, top_k, rounds = 0.7, 3, 40
    expected = exact_distribution(temperature, top_k)
    specpv = short_tails() if mode == "lossless" else None
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


@torch.no_grad()
def exact_texts(temperature: float, top_k: int, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of that length, from the model's own logits in float64."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = torch.tensor([[*PROMPT, *text] for text in texts])
        logits = tiny()(rows, use_cache=False).logits[:, -1].double()
        kept = logits >= logits.topk(top_k).values[:, -1:]
        probs = (logits / temperature).masked_fill(~kept, -torch.inf).softmax(-1)
        texts = {
            (*text, token): chance * float(row[token])
            for (text, chance), row in zip(texts.items(), probs, strict=True)
            for token in row.nonzero().flatten().tolist()
        }
    return texts


@pytest.mark.slow
def test_longer_texts_are_distributed_as_the_model_says() -> None:
    """Lossless: seven tokens take several tails, some of them cut."""
    rng = seeded()
    temperature, top_k, length, rounds = 0.9, 2, 7, 50
    expected = exact_texts(temperature, top_k, length)
    generator = Generator(
        tiny(), drafter=drafter(rng), specpv=short_tails(), page_size=4, pace=False
    )
    counts: Counter[tuple[int, ...]] = Counter()
    cut = 0
    for base in range(0, rounds * 16, 16):
        batch = generator.generate(
            [PROMPT] * 16,
            length + 2,
            temperature=temperature,
            top_k=top_k,
            seed=base,
            tree=TreeConfig(rows=5, depth=2, top_k=2),
        )
        counts.update(tuple(ids[:length]) for ids in batch.token_ids)
        cut += batch.stats.cut_tokens
    assert cut > 50
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    often = {text: total * chance for text, chance in expected.items() if total * chance >= 5}
    cells = [(counts[text], wanted) for text, wanted in often.items()]
    cells.append((total - sum(got for got, _ in cells), total - sum(often.values())))
    chi = sum((got - wanted) ** 2 / wanted for got, wanted in cells if wanted > 0)
    # The bound of Laurent and Massart: beyond it once in a million.
    free = len(cells)
    assert free > 20
    assert chi < free + 2 * (14 * free) ** 0.5 + 28, (chi, free)


def lossless(tail: int) -> SpecPVConfig:
    return SpecPVConfig(
        enable_specpv=True,
        specpv_mode="lossless",
        specpv_block_size=8,
        specpv_n_sink_blocks=1,
        specpv_n_retrieval_blocks=15,
        specpv_n_window_blocks=2,
        specpv_n_spec_tokens_buf=tail,
    )


@torch.no_grad()
def unlike(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose logits differ by a hundred times what rounding does to them."""
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight *= 1 + 1e-4 * torch.randn_like(weight)
    return other


def steady_prompts(
    model: PreTrainedModel, rng: random.Random, options: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and how plain sampling goes on, never by a choice so close that rounding decides it.

    Two tokens at the edge of top-p may be as likely as each other to six digits.
    """
    plains = [Generator(one, drafter="none") for one in (model, *(unlike(model) for _ in range(7)))]
    while True:
        prompts = [random_prompt(rng, 90, 120) for _ in range(2)]
        texts = (plain.generate(prompts, 40, **options).token_ids for plain in plains)
        truth = next(texts)
        if all(text == truth for text in texts):
            return prompts, truth


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tree_drafter_or_view_changes_a_sampled_text(family: str) -> None:
    """Of a seed there is one text: that of plain sampling."""
    rng = seeded()
    model = tiny(family)
    options = {"temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.01, "seed": 11}
    prompts, truth = steady_prompts(model, rng, options)
    known = {tuple(p): ids for p, ids in zip(prompts, truth, strict=True)}
    for tree in (*TREES.values(), TreeConfig(rows=3, depth=2, top_k=2), TreeConfig()):
        for one in (Oracle(known, rng), NgramDrafter(min_tokens=1)):
            result = Generator(model, drafter=one).generate(prompts, 40, tree=tree, **options)
            assert result.token_ids == truth
            assert not isinstance(one, Oracle) or result.stats.accepted > 10
    if family != "mistral":  # whose windows have no views
        small = configured("lossless")
        views = Generator(model, drafter=Oracle(known, rng), specpv=small, pace=False)
        result = views.generate(prompts, 40, tree=TREES["tree"], **options)
        assert result.token_ids == truth
        assert result.stats.step_kinds["partial"] > 0


def slow_draws(logits: torch.Tensor, seed: int, first: int) -> list[int]:
    """Row i draws the token at `first` + i: the first whose cumulative probability is above."""
    told = []
    for row, scores in enumerate(logits):
        _, coin = make_coins(torch.tensor([seed]), torch.tensor([first + row]), 1)
        sums = np.cumsum(scores.double().softmax(-1).numpy())
        told.append(int(np.searchsorted(sums, float(coin) * sums[-1], side="right")))
    return told


def test_long_tails_are_confirmed_up_to_the_first_token_that_sampling_would_not_give() -> None:
    """A tail may be longer than a tree, and a wrong token may be anywhere in it."""
    generator = torch.Generator().manual_seed(1)
    sampled = sampling.Sampling(temperature=1.0)
    for seed in range(30):
        length = 600 if seed % 2 else 250
        logits = torch.randn(length, 5, generator=generator)
        right = slow_draws(logits[:-1], seed, 901 - (length - 1))
        wrong = int(torch.randint(length - 1, (1,), generator=generator))
        for at in (None, 0, wrong, length - 2):
            chain = [0, *right]
            if at is not None:
                chain[at + 1] = (right[at] + 1) % 5
            tree = tree_from_chain(torch.tensor([[chain[-1], 1, 2]]), torch.tensor([900]))
            verdict = sampling.confirm(sampled, chain, logits[:-1], tree, logits[None, -3:], seed)
            assert verdict.whole == (at is None)
            assert verdict.confirmed == (length - 1 if at is None else at)
            if at is not None:
                assert (verdict.path, verdict.next_token) == ([], right[at])


def test_a_tail_may_be_longer_than_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = sampling.confirm

    def confirm(given: Any, chain: list[int], *rest: Any) -> Any:
        sizes.append(len(chain))
        return original(given, chain, *rest)

    monkeypatch.setattr(decoding, "confirm", confirm)
    generator = Generator(tiny(), drafter="ngram", specpv=lossless(400), pace=False)
    tree = TreeConfig(rows=4, depth=3, top_k=1)
    told = generator.generate([7] * 150, 300, temperature=0.3, top_k=3, seed=4, tree=tree)
    assert max(sizes) > 256
    assert len(told.token_ids) == 300


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_the_round(device: str, wrong: float) -> None:
    """On CUDA acceptance does not raise of itself: it draws nothing."""
    tokens = torch.tensor([[3, 4]], device=device)
    tree = tree_from_chain(tokens, torch.zeros(1, dtype=torch.int32, device=device))
    logits = torch.zeros(1, 2, VOCAB, device=device)
    logits[0, 0, 5] = wrong
    with pytest.raises(NworError):
        sampling.judge(sampling.Sampling(0.8), tree, logits, [7])


def test_a_token_that_was_not_drawn_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_from_chain(torch.tensor([[3, 4]]), torch.zeros(1, dtype=torch.int32))

    def draws_nothing(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.full((2, 1), -1), torch.tensor([0, 0]), torch.tensor([-1, -1])

    monkeypatch.setattr(sampling, "accept_sampling", draws_nothing)
    with pytest.raises(NworError, match="logits: got NaN"):
        sampling.judge(sampling.Sampling(0.8), tree, torch.zeros(1, 2, VOCAB), [7])
