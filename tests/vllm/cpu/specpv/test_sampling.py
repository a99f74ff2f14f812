"""Drafts at temperatures above 0: what is emitted follows the target's own distribution.

The speculator of model runner V2 drafts, the sampler of `reference_sampling.py` verifies;
`test_runner_v2.py` compares it with vLLM's kernels. Three models of a few words say what follows a
word: the target, the target over a view, which is off, and a head, which is further off. Seeds are
fixed, so verdicts are.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
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

    dtype = torch.float32

    def key_scales(self) -> list[torch.Tensor]:
        return []

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

    def joint(self, top_k: int = 0, top_p: float = 1.0) -> list[float]:
        """The probability of every run of EMITTED words after the root."""
        after = filtered(self.full, top_k, top_p).double().softmax(1)
        found = []
        for run in itertools.product(range(WORDS), repeat=EMITTED):
            chance, word = 1.0, ROOT
            for following in run:
                chance *= float(after[word, following])
                word = following
            found.append(chance)
        return found


def filtered(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits [words, WORDS] of those words that top-k, and then top-p leave."""
    ordered, order = logits.sort(1, descending=True)
    chances = ordered.double().softmax(1)
    if top_k:
        chances[:, top_k:] = 0
        chances /= chances.sum(1, keepdim=True)
    before = chances.cumsum(1) - chances
    ordered = ordered.masked_fill((chances == 0) | (before >= top_p), -1e30)
    return torch.zeros_like(logits).scatter(1, order, ordered)


def emit(
    words: Words,
    monkeypatch: pytest.MonkeyPatch,
    passes: int,
    *,
    own_noise: bool = True,
    head: bool = True,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[torch.Tensor, float]:
    """[REQUESTS, EMITTED] words that drafting and full steps give, and accepted drafts per step.
    Passes 0: lookups alone."""
    from nwor_specpv.vllm.specpv import draft_sampling
    from nwor_specpv.vllm.specpv import proposals as module

    monkeypatch.setattr(draft_sampling, "gumbel_sample", reference_sampling.gumbel_sample)
    if not own_noise:
        monkeypatch.setattr(module, "_OTHER_SEED", 0)
    spec = make(words, monkeypatch, REQUESTS, head=head)
    spec.draft_logits, spec.draws = torch.full((REQUESTS, LIMIT, WORDS), float("nan")), True
    spec.top_k.fill_(top_k)
    spec.top_p.fill_(top_p)
    full = filtered(words.full, top_k, top_p)
    if not head:  # lookups find what followed a word somewhere in a text without sense
        source = spec._engine.runner.req_states.all_token_ids.gpu
        source[:, : FIRST + 1] = torch.arange(FIRST + 1) ** 2 // 3 % WORDS
        source[:, FIRST] = ROOT
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
            idx_mapping=rows.int(),
            idx_mapping_np=rows.numpy(),
        )
        ones = torch.ones(REQUESTS).int()
        if not head:
            last = spec._update_texts(batch, torch.zeros_like(ones))
        if passes:
            spec._draft_by_passes(batch, passes, ones, torch.zeros_like(ones), roots[:, None])
        else:
            spec._look_up(batch, last)
        drafts = spec.draft_tokens.clone()
        line = torch.cat((roots[:, None], drafts), 1)
        places = prefix[:, None] + torch.arange(LIMIT + 1)
        said, count = reference_sampling.verify(
            full[line], spec.draft_logits, drafts, spec.seeds, places
        )
        running = lens < EMITTED
        accepted.append(float((count[running] - 1).double().mean()))
        for column in range(LIMIT + 1):
            here = running & (column < count)
            at = (lens + column).clamp(max=texts.shape[1] - 1)
            texts[rows[here], at[here]] = said[here, column]
            if not head:
                source[rows[here], FIRST + 1 + at[here]] = said[here, column].int()
        lens = torch.where(running, lens + count, lens)
        roots = torch.where(running, said[rows, count - 1], roots)
    return texts[:, :EMITTED], sum(accepted) / len(accepted)


def compare(runs: torch.Tensor, expected: list[float]) -> tuple[float, float]:
    """Chi-square and its 99.9 % quantile."""
    weights = torch.tensor([WORDS**i for i in reversed(range(EMITTED))])
    counts = torch.bincount(runs @ weights, minlength=len(expected)).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * len(runs)
    possible = wanted > 0
    assert not counts[~possible].any(), "words that top-k or top-p had ruled out"
    counts, wanted = counts[possible], wanted[possible]
    assert wanted.min() >= 5, "a cell is too rare for the test"
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    return statistic, chi_square.quantile(len(wanted) - 1)


@pytest.mark.parametrize("passes", [1, 3])
def test_what_is_emitted_follows_the_target(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    words = Words(seed=passes)
    runs, accepted = emit(words, monkeypatch, passes)
    statistic, limit = compare(runs, words.joint())
    print(f"{passes} passes, {accepted:.2f} accepted: chi-square {statistic:.1f} of {limit:.1f}")
    assert 0.5 < accepted < LIMIT, "drafts are neither all wrong nor all right"
    assert statistic < limit


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_what_is_emitted_without_a_head_follows_the_target(
    monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Chains are drawn by passes, and what lookups add to them is certain."""
    words = Words(seed=5 + passes)
    runs, accepted = emit(words, monkeypatch, passes, head=False)
    statistic, limit = compare(runs, words.joint())
    print(f"{passes} passes, {accepted:.2f} accepted: chi-square {statistic:.1f} of {limit:.1f}")
    assert 0.1 < accepted < LIMIT
    assert statistic < limit
    again, _ = emit(words, monkeypatch, passes, head=False)
    assert torch.equal(runs, again), "seeds say everything"


@pytest.mark.parametrize("head", [False, True], ids=["lookups", "head"])
def test_drafts_obey_top_k_and_top_p(monkeypatch: pytest.MonkeyPatch, head: bool) -> None:
    """The target's words are what top-k and top-p leave. Over a view that is all but right, drafts
    that obey them are right more often."""
    words, limits = Words(seed=2), {"top_k": 3, "top_p": 0.8}
    words.partial = words.full + 0.1 * (words.partial - words.full)
    runs, accepted = emit(words, monkeypatch, 2, head=head, **limits)
    statistic, limit = compare(runs, words.joint(**limits))
    print(f"{accepted:.2f} accepted: chi-square {statistic:.1f} of {limit:.1f}")
    assert statistic < limit
    from nwor_specpv.vllm.specpv import draft_sampling

    free = draft_sampling.target_probs
    monkeypatch.setattr(
        draft_sampling, "target_probs", lambda logits, **_: free(logits, temperature=1.0)
    )
    _, without = emit(words, monkeypatch, 2, head=head, **limits)
    assert accepted > 1.05 * without


def test_drafts_with_the_samplers_own_noise_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a draft that is rejected says which word replaces it: what vLLM's own drafts do in 0.26.
    Later versions have other noise for drafts themselves."""
    words = Words(seed=1)
    runs, _ = emit(words, monkeypatch, 1, own_noise=False)
    statistic, limit = compare(runs, words.joint())
    assert (statistic > limit) is not reference_sampling.HASHED


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


@pytest.mark.parametrize("setting", ["auto", "greedy", "sampled"])
def test_who_owns_draft_logits(
    setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The setting, what vLLM was asked for, and in `auto` the memory that is free."""
    from nwor_specpv import NworError
    from nwor_specpv.vllm.specpv import draft_sampling

    cpu, shape, free = torch.device("cpu"), (2, 3, 5), [10**9]
    monkeypatch.setattr(draft_sampling, "free_bytes", lambda _: free[0])

    def own(held: torch.Tensor | None = None, problem: str = "") -> torch.Tensor | None:
        return draft_sampling.own_logits(setting, held, shape, problem, cpu)

    theirs = torch.zeros(shape)
    assert own(theirs) is (None if setting == "greedy" else theirs)
    made = own()
    assert (made is None) == (setting == "greedy")
    assert made is None or (made.shape == shape and made.dtype == torch.float32)
    assert not caplog.records
    free[0] = 4 * 2 * 3 * 5 * 20 - 1  # they would take more than a twentieth
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        assert (own() is None) == (setting != "sampled")
    assert ["take 0.0 GB, more than 5%" in record.getMessage() for record in caplog.records] == (
        [True] if setting == "auto" else []
    )
    free[0] = 10**9
    if setting == "sampled":
        with pytest.raises(NworError, match="the head has 3 logits; use 'auto'"):
            own(problem="the head has 3 logits")
    else:
        assert own(problem="the head has 3 logits") is None
    assert draft_sampling.free_bytes(cpu) > 0


def test_greedy_batches_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one is sampled is known on the host; then its limits are there for the passes."""
    spec = make(Words(seed=1), monkeypatch, head=False)
    batch = SimpleNamespace(idx_mapping_np=torch.tensor([2, 0]).numpy())

    def both(*values: float) -> SimpleNamespace:
        told = torch.tensor(values)
        return SimpleNamespace(np=told.numpy(), gpu=told)

    states = SimpleNamespace(
        temperature=both(0, 0.7, 0, 0, 0, 0),
        top_k=both(*range(6)),
        top_p=both(0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
        min_p=both(*[0.25] * 6),
    )
    spec._engine.runner.sampler = SimpleNamespace(sampling_states=states)
    spec.draft_logits = torch.zeros(6, LIMIT, WORDS)
    spec._choose_sampling(batch, passes=1)
    assert not spec.draws
    assert spec.top_k.tolist() == [0] * 6
    batch.idx_mapping_np[1] = 1
    spec._choose_sampling(batch, passes=0)
    assert spec.draws
    assert spec.top_k.tolist() == [0] * 6
    spec._choose_sampling(batch, passes=1)
    assert spec.draws
    assert spec.top_k.tolist() == list(range(6))
    assert torch.equal(spec.top_p, states.top_p.gpu)
    assert torch.equal(spec.min_p, states.min_p.gpu)
    spec.draft_logits = None
    spec._choose_sampling(batch, passes=1)
    assert not spec.draws
