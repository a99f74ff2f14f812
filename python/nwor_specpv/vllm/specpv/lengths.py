"""How many drafts and passes are possible on model runner V2; `decisions` chooses among them.

Steps verify no drafts, `specpv_draft_lookup` guesses, or drafts that partial passes made: half of
`num_speculative_tokens`, or all of them. Lookups may fill all of them, too. Each number has CUDA
graphs of its own.
"""

from __future__ import annotations

from typing import Any

from nwor_specpv import VerifyPolicy
from nwor_specpv.arms import Arm, draft_lengths

# Tokens of a match: vLLM's own choice where users say nothing, and ours in its place.
_VLLM_MATCHES = (5, 5)
_MATCHES = (2, 5)
_MOST_MATCHED = 16


def head_drafts(settings: Any, limit: int) -> int:
    """Tokens that are guessed before the target looks at them."""
    return max(1, min(settings.specpv_draft_lookup, limit))


class Lengths:
    """Of one engine, in each of its processes. Thread-safety: none."""

    def __init__(self, settings: Any, limit: int) -> None:
        self.limit, self.guesses = limit, head_drafts(settings, limit)
        self.fixed = settings.specpv_draft_passes  # 0: what pays
        config = settings.specpv()
        budget = config.budget(1 + self.guesses)
        self.view_tokens = budget.static_tokens
        # Requests up to this length have no views.
        self.shortest = VerifyPolicy(config).always_full_tokens(budget)
        self.given_up = False  # passes have failed in this process

    @property
    def drafts(self) -> tuple[int, ...]:
        """Numbers of drafts that steps may have, the largest last."""
        return tuple(draft_lengths(self.limit, self.guesses))

    def fixed_arm(self, longest: int) -> Arm:
        """Without a choice, for steps whose longest request has so many tokens."""
        if longest > self.shortest and not self.given_up:
            return Arm(self.limit, self.fixed)
        return Arm(self.guesses, 0)

    def passes_that_fill(self, longest: int) -> int:
        """Passes where the scheduler is vLLM's own and always asks for all drafts."""
        if longest <= self.shortest or self.given_up:
            return 0
        # The last guesses follow the chain, and 7 of 10 of those before are confirmed.
        chain = max(1, self.limit - self.guesses)
        return self.fixed or -(-chain // max(1, round(0.7 * (1 + self.guesses))))

    def possible(self, max_model_len: int) -> bool:
        """Whether a request can be long enough for passes, which have not failed."""
        return max_model_len > self.shortest and not self.given_up

    def give_up(self) -> None:
        """Passes have failed: there are guesses alone."""
        self.given_up = True


def match_lengths(speculative_config: Any) -> tuple[int, int]:
    """Tokens of a match, at least and at most: the user's `prompt_lookup_min` and `_max`. vLLM puts
    5 and 5 there where users say nothing."""
    said = speculative_config.prompt_lookup_min, speculative_config.prompt_lookup_max
    if said == _VLLM_MATCHES or None in said:
        return _MATCHES
    return max(1, min(said[0], _MOST_MATCHED)), max(1, min(said[1], _MOST_MATCHED))
