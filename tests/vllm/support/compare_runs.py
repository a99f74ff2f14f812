"""How close two runs of greedy requests are where numbers are rounded otherwise.

Kernels of another number of rows round otherwise, in bfloat16 visibly. So tokens may differ, but
only where two of them were all but equally likely, and log-probabilities are close up to there.
`errors_against_float32` says how far either run is from float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class RunComparison:
    """Of requests that were compared up to their first other token."""

    total: int = 0  # tokens that both runs have
    differences: list[float] = field(default_factory=list)  # of log-probabilities of equal tokens
    gaps: list[float] = field(default_factory=list)  # between the two tokens where runs part

    @property
    def mean(self) -> float:
        return sum(self.differences) / max(1, len(self.differences))

    def __str__(self) -> str:
        gaps = ", ".join(f"{gap:.3f}" for gap in self.gaps)
        return (
            f"{len(self.differences)} of {self.total} tokens before the first other one; "
            f"log-probabilities differ by {self.mean:.5f} on average, "
            f"{max(self.differences, default=0):.5f} at most; gaps where they part: [{gaps}]"
        )

    def check(self, *, mean: float = 0.02, most: float = 0.3, share: float = 0.25) -> None:
        assert len(self.differences) > share * self.total, self
        assert self.mean < mean, self
        assert max(self.differences) < most, self
        assert max(self.gaps, default=0) < 2 * most, self


@dataclass
class RunErrors:
    """Of log-probabilities in two runs, at places where both have the same tokens so far."""

    wanted: list[float] = field(default_factory=list)
    got: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Of the mean errors."""
        return sum(self.got) / sum(self.wanted)

    def __str__(self) -> str:
        means = [sum(side) / max(1, len(side)) for side in (self.wanted, self.got)]
        return (
            f"{means[1]:.5f} on average, {self.ratio:.3f} of {means[0]:.5f}, {len(self.got)} places"
        )


@torch.inference_mode()
def errors_against_float32(model: Path, told: Iterable[tuple[list[int], Any, Any]]) -> RunErrors:
    """Against the same weights in float32, by transformers: prompts and vLLM's outputs to them."""
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    found = RunErrors()
    for prompt, wanted, got in told:
        pairs = list(zip(wanted.token_ids, got.token_ids, strict=False))
        count = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
        if count == 0:
            continue
        tokens = [*prompt, *wanted.token_ids[:count]]
        logits = exact(torch.tensor([tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
        exactly = logits.float().log_softmax(-1).cpu()
        for i, token in enumerate(wanted.token_ids[:count]):
            for side, into in ((wanted, found.wanted), (got, found.got)):
                into.append(abs(side.logprobs[i][token].logprob - float(exactly[i, token])))
    return found


def compare_runs(pairs: Iterable[tuple[Any, Any]]) -> RunComparison:
    """Pairs of vLLM's outputs with log-probabilities, a few of them at each place."""
    found = RunComparison()
    for wanted, got in pairs:
        length = min(len(wanted.token_ids), len(got.token_ids))
        found.total += length
        for i in range(length):
            tokens = wanted.token_ids[i], got.token_ids[i]
            if tokens[0] != tokens[1]:
                found.gaps.append(max(_gap(side.logprobs[i], *tokens) for side in (wanted, got)))
                break
            one, other = (side.logprobs[i][tokens[0]].logprob for side in (wanted, got))
            found.differences.append(abs(one - other))
    return found


def _gap(logprobs: Any, one: int, other: int) -> float:
    """Between two tokens of one run; infinite if one of them is not even among the likeliest."""
    if one not in logprobs or other not in logprobs:
        return math.inf
    return abs(logprobs[one].logprob - logprobs[other].logprob)
