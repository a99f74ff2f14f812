"""How many partial passes to draft with on model runner V1: pure functions of measured costs.

m partial passes come before a full step. A pass yields some tokens (its own and the lookups it
confirms); each stands with probability `agreement`, and the first that does not ends the chain.
Behind them are lookups that no pass has seen, as far as drafts may go.
m = 0 means lookups alone: short contexts and small batches, where reading the view instead of the
context saves less than a pass costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nwor_specpv.running_mean import RunningMean

# Passes must gain this much over lookups alone: estimates are rough, and lookups cost nothing.
_MARGIN = 1.05
_DECAY = 0.98  # of the running averages, per observation


@dataclass(frozen=True)
class StepCosts:
    """Seconds. A pass over `rows` rows that reads `tokens` tokens of K/V costs
    base + rows * per_row + tokens * per_token."""

    base: float
    per_row: float
    per_token: float
    full_extra: float = 0.0  # of a full step beyond that: scheduling, sampling

    def run(self, rows: float, tokens: float) -> float:
        return self.base + rows * self.per_row + tokens * self.per_token

    def full(self, rows: float, tokens: float) -> float:
        return self.full_extra + self.run(rows, tokens)


def fit_costs(
    one_row: float, many_rows: float, rows: int, with_view: float, tokens: int
) -> StepCosts:
    """From three measured passes: one row, `rows` rows, and one with `tokens` of K/V to read.

    One row costs what was measured of it, also where noise makes further ones dearer than it.
    """
    per_row = min(one_row, max(0.0, (many_rows - one_row) / max(1, rows - 1)))
    per_token = max(0.0, (with_view - one_row) / max(1, tokens))
    return StepCosts(one_row - per_row, per_row, per_token)


def expected_accepted(agreement: float, drafts: float) -> float:
    """Mean length of the accepted chain of `drafts` tokens."""
    if agreement >= 1.0:
        return drafts
    return agreement * (1 - agreement**drafts) / (1 - agreement)


def running_mean(prior: float, weight: float = 8.0) -> RunningMean:
    """Of what is seen in service, beginning with what is likely."""
    return RunningMean(prior, weight, decay=_DECAY)


@dataclass(frozen=True)
class DraftOutlook:
    """What is known before drafts are made."""

    contexts: Sequence[int]  # tokens of the requests that have views
    view_tokens: int
    others: int  # tokens of the requests that have none
    num_others: int
    rows_per_pass: int
    tokens_per_pass: float
    agreement: float
    lookup_agreement: float
    lookup_tokens: float  # tokens a lookup alone yields
    tokens_behind: float  # of a lookup behind a chain
    max_drafts: int


def choose_passes(costs: StepCosts, known: DraftOutlook) -> int:
    """The number of partial passes with the most tokens per second; 0: lookups alone."""
    requests, context = len(known.contexts), sum(known.contexts)
    if requests == 0:
        return 0
    view = sum(min(known.view_tokens, tokens) for tokens in known.contexts)
    whole = context + known.others

    def rate(passes: int) -> float:
        if passes == 0:
            drafts = known.lookup_tokens
            gained = expected_accepted(known.lookup_agreement, drafts)
        else:
            chain = min(known.max_drafts, passes * known.tokens_per_pass)
            behind = min(known.max_drafts - chain, known.tokens_behind)
            drafts = chain + behind
            gained = expected_accepted(known.agreement, chain)
            gained += known.agreement**chain * expected_accepted(known.lookup_agreement, behind)
        rows = requests * (1 + drafts) + known.num_others * (1 + known.lookup_tokens)
        spent = costs.full(rows, whole)
        spent += passes * costs.run(requests * known.rows_per_pass, view)
        return requests * (1 + gained) / spent if spent > 0 else 0.0

    most = max(1, round(known.max_drafts / max(1.0, known.tokens_per_pass)))
    rates = [rate(0) * _MARGIN, *(rate(passes) for passes in range(1, most + 1))]
    return rates.index(max(rates))
