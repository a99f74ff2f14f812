"""Drafts at temperatures above 0: what is emitted follows the target's own distribution.

The speculator of model runner V2 drafts, the sampler of `reference_sampling.py` verifies;
`test_runner_v2.py` compares it with vLLM's kernels. Three models of a few words say what follows a
word: the target, the target over a view, which is off, and a head, which is further off. Seeds are
fixed, so verdicts are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import chi_square, reference_sampling
from support.speculator_world import LIMIT, ROWS, make

WORDS, REQUESTS, EMITTED, ROOT = 4, 20_000, 3, 1
FIRST = 40  # where the root stands in the text


class Words:
    """Stands for the target over a view and for the head: [WORDS, WORDS] logits of each."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.full = 0.6 * torch.randn(WORDS, WORDS, generator=draw)
        self.partial = self.full + 1.3 * torch.randn(WORDS, WORDS, generator=draw)
        self.head = self.full + 1.3 * torch.randn(WORDS, WORDS, generator=draw)
        self.layers = ["target.0", "target.1"]
        self.layer_index = {"target.0": 0, "target.1": 1}

    @contextlib.contextmanager
    def forward_context(self, *_: Any, **__: Any) -> Iterator[None]:
        yield

    def key_caches(self) -> list[torch.Tensor]:
        return [torch.zeros(4, 16, 1, 16) for _ in self.layers]

    def forward(self, _: Any, tokens: torch.Tensor, __: Any) -> tuple[torch.Tensor, None]:
        return tokens[:, None].float(), None

    def logits(self, words: torch.Tensor) -> torch.Tensor:
        return self.partial[words[:, 0].long()]

    def __call__(self, *, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids[:, None].float()

    def compute_logits(self, words: torch.Tensor) -> torch.Tensor:
        return self.head[words[:, 0].long()]

    def joint(self) -> list[float]:
        """The probability of every run of EMITTED words after the root."""
        after = self.full.double().softmax(1)
        found = []
        for run in itertools.product(range(WORDS), repeat=EMITTED):
            chance, word = 1.0, ROOT
            for following in run:
                chance *= float(after[word, following])
                word = following
            found.append(chance)
        return found


def emit(
    words: Words, monkeypatch: pytest.MonkeyPatch, passes: int, *, own_noise: bool = True
) -> tuple[torch.Tensor, float]:
    """[REQUESTS, EMITTED] words that drafting and full steps give, and accepted drafts per step."""
    from nwor_specpv.vllm.specpv import draft_models
    from nwor_specpv.vllm.specpv import proposals as module

    monkeypatch.setattr(draft_models, "gumbel_sample", reference_sampling.gumbel_sample)
    if not own_noise:
        monkeypatch.setattr(module, "_OTHER_SEED", 0)
    spec = make(words, monkeypatch, REQUESTS)
    spec.draft_logits = torch.full((REQUESTS, LIMIT, WORDS), float("nan"))
    texts = torch.zeros(REQUESTS, EMITTED + LIMIT + 1, dtype=torch.int64)
    lens, roots, accepted = torch.zeros(REQUESTS).long(), torch.full((REQUESTS,), ROOT), []
    rows = torch.arange(REQUESTS)
    while (lens < EMITTED).any():
        # vLLM's own part of drafting: the head's first guess, with its noise.
        prefix = FIRST + lens
        spec.draft_tokens[:, 0] = reference_sampling.gumbel_sample(
            words.head[roots], rows, spec.temperature, spec.seeds, prefix, True
        )
        spec.hidden_states[:, 0] = spec.draft_tokens[:, 0].float()
        batch = SimpleNamespace(
            num_reqs=REQUESTS,
            req_ids=[str(i) for i in range(REQUESTS)],
            seq_lens=prefix.int(),
            seq_lens_cpu_upper_bound=prefix,
            prefill_len_np=torch.zeros(REQUESTS, dtype=torch.int32).numpy(),
            idx_mapping=rows,
        )
        ones = torch.ones(REQUESTS).int()
        spec._draft_by_passes(batch, passes, ones, torch.zeros_like(ones), roots[:, None])
        drafts = spec.draft_tokens.clone()
        line = torch.cat((roots[:, None], drafts), 1)
        places = prefix[:, None] + torch.arange(LIMIT + 1)
        said, count = reference_sampling.verify(
            words.full[line], spec.draft_logits, drafts, spec.seeds, places
        )
        running = lens < EMITTED
        accepted.append(float((count[running] - 1).double().mean()))
        for column in range(LIMIT + 1):
            here = running & (column < count)
            at = (lens + column).clamp(max=texts.shape[1] - 1)
            texts[rows[here], at[here]] = said[here, column]
        lens = torch.where(running, lens + count, lens)
        roots = torch.where(running, said[rows, count - 1], roots)
    return texts[:, :EMITTED], sum(accepted) / len(accepted)


def compare(runs: torch.Tensor, expected: list[float]) -> tuple[float, float]:
    """Chi-square and its 99.9 % quantile."""
    weights = torch.tensor([WORDS**i for i in reversed(range(EMITTED))])
    counts = torch.bincount(runs @ weights, minlength=len(expected)).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * len(runs)
    assert wanted.min() >= 5, "a cell is too rare for the test"
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    return statistic, chi_square.quantile(len(expected) - 1)


@pytest.mark.parametrize("passes", [1, 3])
def test_what_is_emitted_follows_the_target(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    words = Words(seed=passes)
    runs, accepted = emit(words, monkeypatch, passes)
    statistic, limit = compare(runs, words.joint())
    print(f"{passes} passes, {accepted:.2f} accepted: chi-square {statistic:.1f} of {limit:.1f}")
    assert 0.5 < accepted < LIMIT, "drafts are neither all wrong nor all right"
    assert statistic < limit


def test_drafts_with_the_samplers_own_noise_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a draft that is rejected says which word replaces it: what vLLM's own drafts do."""
    words = Words(seed=1)
    runs, _ = emit(words, monkeypatch, 1, own_noise=False)
    statistic, limit = compare(runs, words.joint())
    assert statistic > limit


def test_wrong_draft_logits_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    words, spoilt = Words(seed=1), Words(seed=1)
    runs, _ = emit(words, monkeypatch, 1)
    spoilt.full[ROOT, 0] += 0.15
    statistic, limit = compare(runs, spoilt.joint())
    assert statistic > limit, "the test has no power"


def test_requests_that_wait_keep_their_draft_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal, or one that fails, tells sampling of its own requests alone."""
    spec = make(Words(seed=1), monkeypatch)
    spec.draft_logits = torch.rand(spec.max_num_reqs, LIMIT, WORDS)
    before = spec.draft_logits.clone()
    spec._certain(torch.tensor([4, 1], dtype=torch.int32), ROWS)
    others = [i for i in range(spec.max_num_reqs) if i not in (4, 1)]
    assert torch.equal(spec.draft_logits[others], before[others])
    assert torch.equal(spec.draft_logits[:, :ROWS], before[:, :ROWS])
    sure = spec.draft_logits[[4, 1], ROWS:].softmax(-1)
    assert torch.equal(sure[..., 0], torch.ones(2, LIMIT - ROWS))
