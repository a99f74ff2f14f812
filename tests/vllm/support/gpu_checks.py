"""What tests on a GPU compare and check."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from nwor_specpv import Metrics
from support import chi_square
from support.cache_write_watch import ProposalWriteWatch
from support.compare_runs import RunComparison, compare_runs
from support.disturbances import MAX_TOKENS, Disturbed, Script
from support.engines import check_drafting, drive, greedy, own_engine
from support.engines import stats as own_stats
from support.metric_counts import grown
from support.small_views import varied_prompt

CROWD, SAMPLES = 256, 8192  # requests at once, and in all


@dataclass
class Said:
    """What plain vLLM says: requests by name, and drawn tokens."""

    greedy: dict[str, Any]
    drawn: list[list[int]]
    filtered: list[list[int]] = field(default_factory=list)  # drawn with top-k and top-p


def alike(found: dict[str, list[int]], expected: dict[str, list[int]]) -> float:
    """The share of tokens before the first difference."""
    same = total = 0
    for request, tokens in expected.items():
        total += len(tokens)
        for got, wanted in zip(found[request], tokens, strict=True):
            if got != wanted:
                break
            same += 1
    return same / total


def check_log_probabilities(theirs: list, ours: list, name: str) -> None:
    """Outputs with log-probabilities (float32), compared up to the first other token."""
    differences, total = [], 0
    for wanted, got in zip(theirs, ours, strict=True):
        total += len(wanted.token_ids)
        for index, pair in enumerate(zip(wanted.token_ids, got.token_ids, strict=True)):
            if pair[0] != pair[1]:
                break
            chosen = [side.logprobs[index][pair[0]].logprob for side in (wanted, got)]
            differences.append(abs(chosen[0] - chosen[1]))
    mean, most = sum(differences) / len(differences), max(differences)
    print(f"{name}: {len(differences)} of {total} tokens before the first other one; "
          f"log-probabilities differ by {mean:.5f} on average, {most:.5f} at most")  # fmt: skip
    assert len(differences) > 0.25 * total
    assert mean < 0.02
    assert most < 0.3


def draw(
    llm: Any,
    first_seed: int,
    prompt: list[int] | None = None,
    *,
    crowd: int = CROWD,
    samples: int = SAMPLES,
    **more: Any,
) -> list[list[int]]:
    """Four tokens of each of many requests, which differ in their seeds. `more`: how to sample."""
    prompt, found = prompt or varied_prompt(153), []
    for first in range(first_seed, first_seed + samples, crowd):
        params = [greedy(4, temperature=1.0, seed=first + i, **more) for i in range(crowd)]
        story = drive(llm, [prompt] * crowd, params)
        found += [story.tokens[str(i)] for i in range(crowd)]
    assert len(found) == samples
    assert all(len(tokens) == 4 for tokens in found)
    return found


def check_drawn(
    ours: list[list[int]], theirs: list[list[int]], places: list[slice], *, degrees: int
) -> None:
    """Tokens at these places follow one distribution, by chi-square of at least so many degrees.

    Seeds are fixed, so the verdict is.
    """
    for place in places:
        sides = [[tuple(tokens[place]) for tokens in side] for side in (ours, theirs)]
        statistic, found = chi_square.two_samples(*sides)
        limit = chi_square.quantile(found, deviations=3.72)
        print(f"tokens {place.start} to {place.stop - 1}: chi-square {statistic:.1f} of {found} "
              f"degrees, limit {limit:.1f}")  # fmt: skip
        assert found >= degrees
        assert statistic < limit


def check_filtered(outputs: Iterable[Any], *, top_k: int, top_p: float) -> None:
    """Every token of vLLM's outputs, drawn at temperature 1 with the `top_k` likeliest tokens told,
    is one of those that may be drawn. Sums of probabilities are rounded."""
    ranks = []
    for output in outputs:
        for token, told in zip(output.token_ids, output.logprobs, strict=True):
            rank = told[token].rank
            assert rank <= top_k, (token, rank)
            chances = [(entry.rank, math.exp(entry.logprob)) for entry in told.values()]
            likelier = sum(chance for other, chance in chances if other < rank)
            whole = sum(chance for _, chance in chances)
            assert likelier < top_p * whole + 1e-3, (token, rank, likelier, whole)
            ranks.append(rank)
    print(f"{len(ranks)} tokens, {sum(rank > 1 for rank in ranks)} of them not the likeliest")
    assert any(rank > 1 for rank in ranks)


def check_confirmed(before: dict[str, Any], least: float) -> None:
    """Drafts over views since the snapshot `before`: at least such a share of them is right."""
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)
    drafted, confirmed = (
        grown(before, f"specpv_{kind}_tokens_total") for kind in ("drafted", "confirmed")
    )
    passes = grown(before, "specpv_draft_passes_total")
    print(f"{confirmed} of {drafted} confirmed, {passes} passes")
    assert confirmed > least * drafted > 0


def check_disturbed(
    name: str,
    script: Script,
    found: Disturbed,
    plain: dict[str, Any],
    before: dict[str, Any],
    *,
    least: float,
) -> RunComparison:
    """What must hold on any engine, and at least such a share of the drafts confirmed; how close
    its tokens are to plain vLLM's is returned."""
    check_confirmed(before, least)
    count = len(script.prompts)
    close = compare_runs((plain[str(i)], output) for i, output in found.outputs)
    calm = {str(i): list(output.token_ids) for i, output in found.outputs[:count]}
    together = {str(i): list(output.token_ids) for i, output in found.outputs[count : 2 * count]}
    share = alike(together, calm)
    print(
        f"{name}: {found.preemptions} preemptions, {found.cached} tokens of prompts were cached, "
        f"{found.cut} cut, {found.stops} stops, {own_engine().num_replays} steps were replayed\n"
        f"plain vLLM: {close}\npreempted as alone before a difference: {share:.2f}"
    )
    assert len(found.outputs) > 3 * count
    assert all(len(tokens) == MAX_TOKENS for tokens in calm.values())
    assert share > 0.5
    return close


def check_proposals(
    llm: Any, long: list[list[int]], monkeypatch: pytest.MonkeyPatch, *, least: float
) -> None:
    """Serves prompts that have views in graphs: no proposal writes to the target's caches, and at
    least such a share of the drafts is confirmed."""
    drive(llm, long[:1], greedy(2))  # caches are bound, and our side knows its runner
    assert not hasattr(own_engine().runner, "input_batch"), "the V1 runner was used"
    proposals, before = ProposalWriteWatch(monkeypatch), Metrics().snapshot()
    replays = own_engine().num_replays
    story = drive(llm, long, greedy(MAX_TOKENS), arrivals=[0, 0, 3, 3])
    assert all(len(tokens) == MAX_TOKENS for tokens in story.tokens.values())
    assert own_engine().num_replays > replays
    proposals.check()
    check_confirmed(before, least)


def watch_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests saw views in each step that was replayed from a graph."""
    from nwor_specpv.vllm.specpv.refresh_requests import RefreshRequests
    from nwor_specpv.vllm.steps import Steps

    decide, note = RefreshRequests.decide, Steps._note_replay
    latest, replayed = [0], []

    def counting(self: Any, *batch: Any) -> list[Any]:
        decisions = decide(self, *batch)
        latest[0] = sum(decision.partial for decision in decisions)
        return decisions

    def noting(self: Any, step: Any) -> None:
        before = self.num_replays
        note(self, step)
        if self.num_replays > before:
            replayed.append(latest[0])

    monkeypatch.setattr(RefreshRequests, "decide", counting)
    monkeypatch.setattr(Steps, "_note_replay", noting)
    return replayed
