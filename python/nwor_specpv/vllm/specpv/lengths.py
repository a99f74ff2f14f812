"""How many drafts a step verifies, and how many partial passes make them (model runner V2).

Either the head drafts alone, `specpv_draft_lookup` tokens, or partial passes draft
`num_speculative_tokens`: other lengths would need graphs of their own. The scheduler decides for
the next step, the worker follows it. Costs are measured at start where there is one rank, whose
process the scheduler shares; elsewhere everybody must come to the same answer alone, so batch times
context decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nwor_specpv import _C, VerifyPolicy

from .late_counts import LateCounts
from .policy import DraftOutlook, StepCosts, choose_passes, running_mean

if TYPE_CHECKING:
    from .chain import Chains

# Tokens of batch times context from which passes pay on large GPUs; several ranks go by it.
PAYS_FROM = 150_000
# Seconds of a full step beyond those of a pass, which has a turn of the head as well: sampling.
_FULL_EXTRA = 0.3e-3
_LOOK_INTERVAL = 8  # steps between looks at what was accepted of the head's own drafts


def head_drafts(settings: Any, limit: int) -> int:
    """Tokens that the head drafts before the target looks at them."""
    return max(1, min(settings.specpv_draft_lookup, limit))


class Lengths:
    """The choice of one engine. Thread-safety: none."""

    def __init__(self, settings: Any, limit: int, *, single_rank: bool) -> None:
        self._fixed = settings.specpv_draft_passes
        self._limit = limit
        self._guesses = head_drafts(settings, limit)
        config = settings.specpv()
        budget = config.budget(1 + self._guesses)
        self.view_tokens = budget.static_tokens
        # Requests up to this length have no views.
        self.shortest = VerifyPolicy(config).always_full_tokens(budget)
        self._max_views = settings.specpv_max_requests
        self._single_rank = single_rank
        self.costs: StepCosts | None = None
        self._given_up = False
        self.agreement = running_mean(0.95)
        self.head_agreement = running_mean(0.7)
        self.tokens_per_pass = running_mean(0.7 * (1 + self._guesses))

    def number(self, contexts: Sequence[int]) -> int:
        """Drafts that requests of these lengths get next."""
        return self._limit if self.passes(contexts) else self._guesses

    def passes(self, contexts: Sequence[int]) -> int:
        """Partial passes that make them; 0: the head drafts alone.

        Whoever has no view reads its whole context in every pass. Of more long requests than there
        are views the shortest are taken to have them: who came first is not known here.
        """
        long = sorted(tokens for tokens in contexts if tokens > self.shortest)
        long = long[: self._max_views]
        if self._given_up or not long:
            return 0
        if self._fixed:
            return self._fixed
        others = sum(contexts) - sum(long)
        if self.costs is None:
            if sum(long) < PAYS_FROM + others:
                return 0
            # The head's last guesses follow the chain.
            chain = max(1, self._limit - self._guesses)
            return -(-chain // max(1, round(0.7 * (1 + self._guesses))))
        known = DraftOutlook(
            contexts=long,
            view_tokens=self.view_tokens,
            others=others,
            num_others=len(contexts) - len(long),
            all_pass=True,
            rows_per_pass=1 + self._guesses,
            tokens_per_pass=self.tokens_per_pass.value,
            agreement=min(self.agreement.value, 0.999),
            lookup_agreement=min(self.head_agreement.value, 0.999),
            lookup_tokens=self._guesses,
            tokens_behind=self._guesses,
            max_drafts=self._limit,
        )
        return choose_passes(self.costs, known)

    def possible(self, max_model_len: int) -> bool:
        """Whether a request can be long enough for passes, which have not failed."""
        return max_model_len > self.shortest and not self._given_up

    @property
    def wants_costs(self) -> bool:
        """Whether measured costs are missing, and would decide."""
        return self._single_rank and not self._fixed and self.costs is None

    def learn(self, costs: StepCosts) -> None:
        """What passes were measured to cost here."""
        if self._single_rank:
            self.costs = StepCosts(costs.base, costs.per_row, costs.per_token, _FULL_EXTRA)

    def give_up(self) -> None:
        """Passes have failed: the head drafts alone."""
        self._given_up = True

    def observe(self, counts: Sequence[int]) -> None:
        """What `AcceptanceCounts` has counted since the last time."""
        confirmed, judged, head_confirmed, head_judged, tokens, passes = counts
        _C.count("specpv_confirmed_tokens_total", confirmed)
        _C.count("specpv_drafted_tokens_total", tokens)
        if judged:
            self.agreement.add(confirmed, judged)
        if head_judged:
            self.head_agreement.add(head_confirmed, head_judged)
        if passes:
            self.tokens_per_pass.add(tokens, passes)


class AcceptanceCounts:
    """Counts on the device what full steps accepted; read a little later, without waiting."""

    def __init__(self, device: torch.device, observe: Any) -> None:
        self._counts = LateCounts(6, device)
        self._observe = observe
        self._steps = 0
        self._chained: tuple[Chains, list[str], int] | None = None  # whose drafts are verified next
        self._names: list[str] = []

    def drafted(self, chains: Chains | None, names: list[str], passes: int) -> None:
        """Drafts of these requests were made, by passes or by the head alone (None)."""
        self._chained = (chains, names, passes) if chains is not None else None
        self._names = names

    def judged(self, names: list[str], lens: Sequence[int], num_rejected: torch.Tensor) -> None:
        """A full step had `lens[b]` drafts of each request and rejected some of them."""
        self._steps += 1
        if names != self._names or not names:
            return
        if self._chained is None and self._steps % _LOOK_INTERVAL:  # short steps feel every launch
            return
        scheduled = lens[0]
        if any(number != scheduled for number in lens) or scheduled == 0:
            return
        accepted = (scheduled - num_rejected[: len(names)]).clamp(min=0)
        counts = self._counts.counts
        if self._chained is None:
            ended = accepted < scheduled
            counts[2] += accepted.sum()
            counts[3] += (accepted + ended).sum()
        else:
            chains, _, passes = self._chained
            ends = chains.lens[: len(names)].clamp(max=scheduled)
            active = chains.active[: len(names)]
            confirmed = torch.minimum(accepted, ends)
            counts[0] += (confirmed * active).sum()
            counts[1] += ((confirmed + (accepted < ends)) * active).sum()
            # The head's guesses behind a chain are judged where all of it was right.
            guesses = (scheduled - ends).clamp(max=chains.rows - 1)
            right = torch.minimum(accepted - ends, guesses)
            reached = active & (right >= 0)
            counts[2] += (right * reached).sum()
            counts[3] += ((right + (right < guesses)) * reached).sum()
            counts[4] += (ends * active).sum()
            counts[5] += active.sum() * passes
        new = self._counts.read()
        if new is not None:
            self._observe(new)
