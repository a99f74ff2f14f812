"""Decoding texts step by step with a drafter, against the ranks that training measures."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import DraftTree, models
from nwor_specpv.drafters import Drafter, TreeConfig
from nwor_specpv.drafters.eagle3 import Eagle3Drafter
from nwor_specpv.drafters.eagle3_head import Eagle3Head
from nwor_specpv.models import stories
from nwor_specpv.train import acceptance, eagle3, measure
from nwor_specpv.train.prompts import Opening
from nwor_specpv.train.target import TrainingTarget

SEED = int(os.environ.get("NWOR_TEST_SEED", torch.seed() % 2**31))


class Knowing(Drafter):
    """Proposes what really comes, `right` tokens of it, and a wrong one after."""

    def __init__(self, text: Sequence[int], right: int) -> None:
        self._text, self._right, self._at = list(text), right, 0

    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None:
        assert list(prompt_ids) == self._text[: len(prompt_ids)]

    def observe(self, request: Hashable, tokens: Sequence[int], features: Any) -> None:
        assert len(tokens) == len(features)
        self._at += len(tokens)
        assert self._text[self._at] == tokens[-1]

    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[DraftTree]:
        end = self._at + 1 + self._right
        return [DraftTree([*self._text[self._at : end], -1])]

    def end(self, request: Hashable) -> None: ...


@pytest.fixture(scope="module")
def target() -> TrainingTarget:
    return TrainingTarget(stories())


def openings(count: int) -> list[Opening]:
    return [
        Opening("chat", torch.randint(3, 500, (2 + index % 3,)).tolist(), (0, 0), [])
        for index in range(count)
    ]


def test_a_step_gives_the_right_drafts_and_one_more(target: TrainingTarget) -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    corpus = acceptance.write_texts(target, openings(1), 24, 40)
    for right in (0, 3):
        tally = acceptance.Tally()
        drafter = Knowing(corpus.tokens[0].tolist(), right)
        acceptance.walk(drafter, corpus, 0, TreeConfig(), target.hidden, tally)
        assert tally.rows == tally.steps * (right + 2)
        answer = int(((corpus.weight[0] >= 1) & (corpus.start[0] == 0)).sum())
        assert tally.tokens == answer - 1  # the prompt's own step gave the first
        assert tally.steps == -(-tally.tokens // (right + 1))
        assert tally.tokens >= 20


def test_a_limit_of_nothing_counts_nothing() -> None:
    tally = acceptance.Tally(limit=0)
    tally.add(0, 5, 2, 3)
    assert tally == acceptance.Tally(limit=0)


def test_chains_gain_what_the_ranks_say(target: TrainingTarget, tmp_path: Path) -> None:
    print(f"seed={SEED}")
    torch.manual_seed(SEED)
    corpus = acceptance.write_texts(target, openings(4), 24, 36)
    plan = eagle3.TrainingPlan(rows=2, length=36, tokens=72, draft_vocabulary=400, intermediate=96)
    training = eagle3.Training(target, openings(2), openings(1), plan, tmp_path)
    training._make_head(corpus)
    head = training._head
    for _ in range(16):  # as it starts it knows nothing
        training._find_gradients(corpus, plan.steps, 1.0)
        for weight in head.weights.values():
            weight.data -= 0.02 * weight.grad.sign()
            weight.grad = None
    batch = training._batch(corpus, head, training._listed)
    found = eagle3.ranks(head, batch, training._listed[1], 4)
    counts, start = corpus.weight >= 1, corpus.start
    expected = measure.tokens_per_step(found.view(4, 4, 36), counts, start, measure.CHAIN)
    tally = acceptance.Tally()
    # Ranks are those within the head's vocabulary: a text's own tokens would take some places.
    drafter = Eagle3Drafter(
        head, target.embedding, dtype=torch.float32, min_probability=0.0, own_tokens=0
    )
    for row in range(4):
        tree = TreeConfig(rows=5, depth=4, top_k=1)
        acceptance.walk(drafter, corpus, row, tree, target.hidden, tally)
    assert (tally.tokens, tally.steps) == expected
    assert tally.tokens > tally.steps  # it has learnt these texts


def test_shorter_answers_are_the_first_tokens_of_longer_ones(target: TrainingTarget) -> None:
    corpus = acceptance.write_texts(target, openings(3), 24, 40)
    short = acceptance.shorten(corpus, 5)
    for row in range(3):
        was = [at for at in range(40) if corpus.weight[row, at] >= 1 and corpus.start[row, at] == 0]
        now = [at for at in range(40) if short.weight[row, at] >= 1 and short.start[row, at] == 0]
        assert now == was[:5]
        assert len(was) > 5
    assert short.tokens is corpus.tokens
    # A walk over the whole answer knows what a walk over the shorter one would have found.
    for right in (0, 2, 5):
        for limit in (1, 2, 5, 9, 99):
            part = acceptance.shorten(corpus, limit)
            expected, got = acceptance.Tally(), acceptance.Tally(limit)
            for texts, tally in ((part, expected), (corpus, got)):
                drafter = Knowing(corpus.tokens[0].tolist(), right)
                acceptance.walk(drafter, texts, 0, TreeConfig(), target.hidden, tally)
            assert got == dataclasses.replace(expected, limit=limit)


def test_figures_are_printed_whatever_becomes_of_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"weights": "head"}
    acceptance.report_figures(figures, tmp_path / "figures.json")
    assert json.loads(capsys.readouterr().out) == figures
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    gone = tmp_path / "gone" / "figures.json"
    monkeypatch.setattr(acceptance, "run", lambda _: acceptance.report_figures(figures, gone))
    assert acceptance.main([]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == figures
    assert err.startswith("train.acceptance: [Errno 2] No such file")


@pytest.mark.parametrize("option", ["--invented", "--prompts", "--answer-tokens"])
def test_counts_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0", "-3"):
        with pytest.raises(SystemExit) as ended:
            acceptance.main(["--weights=/nowhere", f"{option}={wrong}"])
        assert ended.value.code == 2
        assert f"{option}: got {wrong}, expected 1 or more" in capsys.readouterr().err


def test_a_head_of_another_target_is_refused(
    target: TrainingTarget,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "smollm2", lambda _: stories())
    shape = eagle3.head_shape(target, eagle3.TrainingPlan(intermediate=8))
    for change, line in (
        ({"hidden": target.hidden + 2}, f"hidden {target.hidden + 2}, expected {target.hidden}"),
        ({"target_vocabulary": 40}, f"target_vocabulary 40, expected {target.vocabulary}"),
        (
            {"feature_layers": (0, target.num_layers)},
            f"feature_layers (0, {target.num_layers}), expected 0 to {target.num_layers - 1}",
        ),
    ):
        other = dataclasses.replace(shape, **change)
        weights = {name: torch.ones(size) for name, size in other.sizes().items()}
        path = tmp_path / "head.safetensors"
        Eagle3Head(other, weights, torch.arange(9)).save(path)
        assert acceptance.main([f"--weights={path}"]) == 2
        assert capsys.readouterr().err == f"train.acceptance: {path}: got a head of {line}\n"


def test_error_is_that_of_a_mean_where_texts_have_equal_steps() -> None:
    tokens = [20, 26, 23, 31, 25]
    tallies = [acceptance.Tally(steps=10, tokens=count, rows=50) for count in tokens]
    means = [count / 10 for count in tokens]
    expected = statistics.stdev(means) / len(means) ** 0.5
    found = acceptance.report(tallies)
    assert found == {"tokens": 2.5, "error": pytest.approx(expected, abs=5e-4), "rows": 5.0}
