"""What each step's drafts are: decided by the scheduler, followed by all ranks.

A decision travels with vLLM's plan of the step: `num_spec_tokens_to_schedule`, vLLM's own field, is
the number of drafts of the next step; `nwor_specpv_passes` is the number of partial passes that
make them; `nwor_specpv_counts` is what workers count, as their processes serve metrics.

With `rests`, most plain steps are taken as they come: a choice costs the host some hundredths of a
millisecond, and a step of many requests may take little more than two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nwor_specpv.arms import PLAIN, Arm, ArmChoice, Choice
from nwor_specpv.errors import logger
from nwor_specpv.vllm.hooks.runner import COUNTS, PASSES

from .step_clock import StepClock

_LOG_SECONDS = 60.0
_VERIFIES = "nwor_specpv_verifies"  # how many passes made the drafts of a step
_RESTS = "nwor_specpv_rests"  # the step is taken as it comes


class Decisions(ABC):
    """Of one scheduler. Thread-safety: none."""

    rests = False

    def __init__(self, choice: ArmChoice) -> None:
        self.choice = choice
        self._clock = StepClock()
        self._counts: Counter[str] = Counter()
        self._passes = 0  # of the latest decision, whose drafts the next step verifies
        self._seen = (0, 0)  # switches and probe steps that were counted
        self._logged: tuple[float, tuple[int, int]] | None = None  # when, and what then
        self._resting: Choice | None = None  # plain steps like this one need no decision
        self._batch = self._left = self._rested = 0  # its requests; such steps to come, and taken

    @abstractmethod
    def choose(self, batch: int, context: float, longest: int, *, measurable: bool) -> Choice:
        """By `choice`, for `batch` requests of `context` tokens on average, `longest` at most.
        `measurable`: the step has no rows of prompts."""

    def fixed_arm(self, longest: int) -> Arm | None:
        """Where the user has fixed it; None: there is a choice."""
        return None

    def name(self, arm: Arm) -> str:
        """For the log."""
        return str(arm)

    def decide(self, output: Any, requests: Mapping[str, Any], now: float) -> Arm:
        """Decides for the drafts that a scheduled step makes, and writes it into its plan."""
        rows, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        # A request has more rows than one and its drafts where these are of a prompt.
        number = output.total_num_scheduled_tokens
        if self._left:
            if number == len(rows) == self._batch and not output.scheduled_new_reqs:
                self._left -= 1
                self._rested += 1
                output.num_spec_tokens_to_schedule = 0
                setattr(output, _RESTS, True)
                return PLAIN
            self._left = 0
        self._wake()
        measurable = number == len(rows) + sum(map(len, drafts.values()))
        if measurable and not output.scheduled_new_reqs:  # vLLM has listed what is asked for here
            computed = output.scheduled_cached_reqs.num_computed_tokens
            batch, whole = len(rows), number + sum(computed)
            longest = max(computed, default=0) + max(rows.values(), default=0)  # at most
        else:
            ends = list(_ends(rows, requests))
            batch, whole, longest = len(ends), sum(ends), max(ends, default=0)
        arm = self.fixed_arm(longest) if batch else PLAIN
        if arm is None:
            chosen = self.choose(batch, whole / batch, longest, measurable=measurable)
            self._clock.scheduled(output, chosen, now, measurable=measurable)
            arm = chosen.arm
            self._log(chosen, batch, now)
            self._resting, self._batch = chosen, len(rows)
            self._left = self.choice.rest(chosen) if self.rests and measurable else 0
        output.num_spec_tokens_to_schedule = arm.drafts
        setattr(output, PASSES, arm.passes)
        setattr(output, _VERIFIES, self._passes)
        self._passes = arm.passes
        self._counts[f"specpv_{_kind(arm)}_steps_total"] += batch > 0
        setattr(output, COUNTS, self._counts)
        self._counts = Counter()
        return arm

    def finish(self, output: Any, sampled: Sequence[Sequence[int]], now: float) -> None:
        """A step's output is there: the tokens of each of its requests."""
        if getattr(output, _RESTS, False):
            self._clock.pause()
            return
        self._count_confirmed(output, sampled)
        found = self._clock.finished(output, now)
        if found is None:
            return
        chosen, seconds = found
        tokens = [number for number in map(len, sampled) if number]
        self.choice.observe(chosen, seconds, tokens)
        if seconds is not None:
            kind = f"specpv_{_kind(chosen.arm)}_step"
            self._counts[f"{kind}_tokens_total"] += sum(tokens)
            self._counts[f"{kind}_seconds_total"] += round(1e6 * seconds)  # as `count` takes it
        now_seen = (self.choice.switches, self.choice.probe_steps)
        if now_seen != self._seen:
            self._counts["specpv_arm_switches_total"] += now_seen[0] - self._seen[0]
            self._counts["specpv_probe_steps_total"] += now_seen[1] - self._seen[1]
            self._seen = now_seen

    def _wake(self) -> None:
        """Makes up for the steps that were taken as they came."""
        if self._rested and self._resting is not None:
            self.choice.pass_over(self._resting.cell, self._rested)
            self._counts["specpv_plain_steps_total"] += self._rested
        self._rested = 0

    def _count_confirmed(self, output: Any, sampled: Sequence[Sequence[int]]) -> None:
        """Of drafts by passes: those that were right, and the first wrong one of each request."""
        if not getattr(output, _VERIFIES, 0):
            return
        number = max(map(len, output.scheduled_spec_decode_tokens.values()), default=0)
        if not number:
            return
        right = sum(max(0, len(ids) - 1) for ids in sampled)
        wrong = sum(0 < len(ids) <= number for ids in sampled)
        self._counts["specpv_confirmed_tokens_total"] += right
        self._counts["specpv_drafted_tokens_total"] += right + wrong

    def _log(self, chosen: Choice, batch: int, now: float) -> None:
        """At most a line a minute, and only if something was tried."""
        tried = (self.choice.switches, self.choice.probe_steps)
        if self._logged is None:
            self._logged = now, tried
        if now < self._logged[0] + _LOG_SECONDS or tried == self._logged[1]:
            return
        switches, probes = (now - then for now, then in zip(tried, self._logged[1], strict=True))
        self._logged = now, tried
        rates = ", ".join(
            f"{self.name(arm)} {batch * rate:.0f}"
            for arm, rate in self.choice.rates(chosen.cell).items()
        )
        logger.info(
            "nwor_specpv: %d requests take steps of kind: %s (measured tokens per second: %s); "
            "%d switches and %d probe steps since the last line",
            batch,
            self.name(chosen.cell.arm),
            rates or "none yet",
            switches,
            probes,
        )


def _ends(rows: Mapping[str, int], requests: Mapping[str, Any]) -> Iterator[int]:
    """Where the requests end that get a token in a step with so many rows of each."""
    for name, number in rows.items():
        request = requests[name]
        end = request.num_computed_tokens + number
        if end >= request.num_tokens + request.num_output_placeholders:
            yield end


def _kind(arm: Arm) -> str:
    if not arm.drafts:
        return "plain"
    return "pass" if arm.passes else "guess"
