"""Our copy of texts on the device: it is vLLM's text up to its end, whatever steps did to it."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from nwor_specpv.vllm.specpv.texts import Texts

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
LIMIT, MAX_TOKENS, REQUESTS = 6, 400, 4


def test_copies_follow_requests_that_come_go_and_wait() -> None:
    """Ends are known at most: one step is in flight, whose drafts may be rejected. Requests leave,
    others get their index, and some steps draft nothing, so that texts are behind."""
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    texts = Texts(REQUESTS, MAX_TOKENS, LIMIT, (2, 5), torch.device("cpu"))
    source = torch.zeros(REQUESTS, MAX_TOKENS, dtype=torch.int32)
    known: dict[str, tuple[int, list[int], int]] = {}  # index, text, its prompt's tokens
    made = skipped = 0
    for _ in range(400):
        for name in list(known):
            if rng.random() < 0.05 or len(known[name][1]) > MAX_TOKENS - 2 * LIMIT:
                del known[name]
        free = sorted(set(range(REQUESTS)) - {index for index, _, _ in known.values()})
        if free and rng.random() < 0.4:
            prompt = [rng.randrange(99) for _ in range(rng.choice((3, 40, 200)))]
            known[f"{made}"] = (free[0], prompt, len(prompt))
            made += 1
        step = []
        for name, (index, text, prompt) in known.items():
            if rng.random() < 0.1:
                continue  # it waits
            text += [rng.randrange(99) for _ in range(1 + rng.randint(0, LIMIT))]
            source[index, : len(text)] = torch.tensor(text, dtype=torch.int32)
            step.append((name, index, text, prompt))
        if not step or rng.random() < 0.2:
            skipped += 1
            continue  # without drafts
        prefix = torch.tensor([len(text) - 1 for _, _, text, _ in step], dtype=torch.int32)
        ends = [len(text) - 1 + rng.randint(0, 2 * LIMIT) for _, _, text, _ in step]
        texts.update(
            source,
            [name for name, _, _, _ in step],
            np.array([index for _, index, _, _ in step]),
            np.array(ends),
            np.array([prompt for _, _, _, prompt in step]),
            torch.tensor([index for _, index, _, _ in step], dtype=torch.int32),
            prefix,
        )
        rows = torch.tensor([index for _, index, _, _ in step], dtype=torch.int32)
        for _, index, text, _ in step:
            assert texts.tokens[index, : len(text)].tolist() == text
        # Drafts lie beyond the ends, and nowhere for those who take no part.
        takes = torch.tensor([rng.random() < 0.7 for _ in step])
        nowhere = torch.full_like(rows, texts.nobody)
        drafts = torch.randint(100, 200, (len(step), LIMIT))
        texts.append(torch.where(takes, rows, nowhere), prefix + 1, drafts)
        for b, (_, index, text, _) in enumerate(step):
            behind = texts.tokens[index, len(text) : len(text) + LIMIT]
            assert texts.tokens[index, : len(text)].tolist() == text
            assert (behind.tolist() == drafts[b].tolist()) == bool(takes[b])
    assert made > 10
    assert skipped > 20


def test_a_prompt_is_there_as_a_whole_before_it_is_computed() -> None:
    texts = Texts(2, 300, LIMIT, (2, 5), torch.device("cpu"))
    source = torch.arange(600, dtype=torch.int32).view(2, 300)
    one = torch.tensor([1], dtype=torch.int32)
    texts.update(source, ["a"], *map(np.array, ([1], [64], [250])), one, torch.tensor([64]))
    assert torch.equal(texts.tokens[1, :250], source[1, :250])
    assert texts.bytes == texts.tokens.nbytes >= 4 * 2 * 300
