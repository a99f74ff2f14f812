"""Which arm a step takes: plain, so many guesses, or so many partial passes. Pure: times are given.

The arm with the most tokens per second is taken, as measured while serving. Rules:

* A cell (see `estimates`) starts with plain steps, or with what its nearest neighbour does.
* Other arms are tried in short probes. What they lose against the chosen arm is paid from an
  account, which grows by 1 % of the time served. The worse an arm was, the longer it waits: the
  doubt about it must first have grown beyond the chosen arm's rate.
* An arm is chosen if the lower bound of its rate is 1 % above the chosen arm's rate.
* When 8 steps in a row yield less than 0.97 of plain, plain is chosen at once. What was known of
  numbers of passes in this cell must be measured again; where guesses were chosen, other numbers
  of guesses are expected to be right as much less often.
* What changes the time of the chosen arm's steps changes that of the others alike: a busy host, a
  device that runs hot.
* Where `foresee` says how many guesses would be right, that is what probes of guesses go by.
* More guesses than a few are tried where the next fewer were right.
* Numbers of passes are tried from the inside out: one that was never measured is priced from those
  beside it. Time grows evenly with passes; tokens grow ever more slowly.
* A probe is the next steps of the whole engine, whatever their cells: with asynchronous scheduling
  on a busy host, a step's time has parts of the two steps after it (see vLLM's `step_clock`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .estimates import ENOUGH, PLAIN, Arm, Cell, Cells, Estimate, Outlook

_MARGIN = 1.01  # an arm must be so much better
_LEAST_OF_PLAIN, _BAD_STEPS = 0.97, 8
_LARGE_BATCH = 8  # requests whose steps say as much as two others
_BORROW_INTERVAL = 32
_FRESH = 100  # steps up to which an observation prices the numbers of passes beside it
_PAID = 0.01  # share of the time served that probes may lose
# Plain steps' worth of time: what the account has at most; at most where plain steps are taken and
# what guesses would yield is foreseen; at least.
_MOST_CREDIT, _MOST_FORESEEN, _LEAST_CREDIT = 40, 3, -16
# Plain steps' worth that a step without passes costs the account at most; the first step of a probe
# may take seconds, since kernels are loaded and memory is taken, which says nothing about the arm.
_MOST_COST, _MOST_FIRST_COST = 6, 3
_WORTH = 1.03  # what a probe must promise that does not wait for its turn
# Of arms that nobody has seen, relative to plain steps.
_NEVER = 1_000_000  # steps since an arm was seen
_FORESEEN = 2000  # steps that double what an arm may yield beside what is foreseen of it
_FIRST_GUESSES = Outlook(1.2, 1.3, 1.0, _NEVER)
# Of more guesses than a few, relative to the few: their time, and how many more are right.
_MORE_GUESSES = Outlook(1.15, 1.5, 1.0, _NEVER)
_FIRST_BASE, _FIRST_PER_PASS, _FIRST_TOKENS_PER_PASS = 1.3, 0.6, 0.6


@dataclass(frozen=True)
class Pace:
    """How soon arms are tried and judged. The defaults are those of an engine that serves for long
    and knows what a step took two steps later."""

    probe_steps: int = 6
    probe_requests: int = 0  # that are enough: more requests need fewer steps; 0: all steps
    settle_steps: int = 3  # after a probe, until its last step is known
    look_interval: int = 8  # visits of a cell between looks at all arms
    slow_first: bool = True  # the first step of a probe says nothing about the later ones
    # Plain steps' worth of time: what the account has at first, how far a probe may overdraw it
    # before it is broken off, and what a probe may lose without waiting for its turn.
    first_credit: float = 8.0
    most_debt: float = 4.0
    free: float = 0.5


class Choice(NamedTuple):
    """What was chosen for a step, to be given back with what came of it."""

    arm: Arm
    cell: Cell
    probe: bool = False
    first: bool = False  # of a probe: its time is not that of the later ones
    paid: float = 0.0  # seconds


@dataclass
class _Probe:
    arm: Arm
    left: int  # steps
    first: bool = True
    paid: float = 0.0  # for each step
    least: float = -math.inf  # of the account: then it is broken off


class _Hope(NamedTuple):
    arm: Arm
    expected: Outlook
    rate: float  # that is still possible

    def loss(self, rate: float) -> float:
        """Seconds that a step is expected to lose against an arm of this rate."""
        return max(0.0, self.expected.seconds - self.expected.tokens / rate)


class ArmChoice:
    """The choice of one engine. Thread-safety: none.

    `arms`: plain first, then numbers of guesses, then numbers of passes, all in order. `price`:
    how many times as long a step of one arm takes as a step with the next fewer guesses, before
    anything was measured.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        pace: Pace | None = None,
        price: Callable[[Arm, Arm], float] | None = None,
    ) -> None:
        self.arms = list(arms)
        self._pace, self._price = pace or Pace(), price
        # Tokens that a step with so many guesses would yield for a request, and their error, if the
        # caller knows without taking such steps.
        self.foresee: Callable[[int], tuple[float, float] | None] = lambda _: None
        self._foreseeing = False  # as of the latest look
        self.switches = 0
        self.probe_steps = 0
        self._without = [arm for arm in self.arms if not arm.passes]
        self._with = [arm for arm in self.arms if arm.passes]
        self._start = self._with[:2][-1:]  # 2 passes, which say enough of others
        self._cells = Cells()
        self._credit: float | None = None  # seconds; None: no plain step was measured yet
        self._probe: _Probe | None = None
        self._latest: tuple[Arm, int] = (PLAIN, 0)  # of the latest probe: its arm and its end
        self._steps = 0
        self._probe_steps = self._pace.probe_steps
        self._passes_failed = False

    # ---- what the scheduler calls ---------------------------------------------------------------

    def choose(
        self,
        batch: int,
        context: float,
        *,
        passes: bool,
        measurable: bool = True,
        only: Sequence[Arm] | None = None,
    ) -> Choice:
        """For the next step of `batch` requests with a mean context.

        `passes`: a request is long enough for partial passes. `measurable`: the step has no rows
        of prompts, so its time says something. `only`: the arms to choose from, plain among them;
        default: all that are possible.
        """
        passes = passes and not self._passes_failed
        arms = only or (self.arms if passes else self._without)
        if self._pace.probe_requests:
            needed = -(-self._pace.probe_requests // batch)
            self._probe_steps = min(self._pace.probe_steps, needed)
        cell = self._cells.find(batch, context, passes=passes)
        if cell.arm not in arms:
            cell.arm = PLAIN
        if not measurable:
            return Choice(cell.arm, cell)
        self._steps += 1
        cell.visits += 1
        if not self._pace.settle_steps and self._is_over(arms):
            self._end_probe()
        if self._probe is None and cell.visits >= cell.next_look:
            self._look(cell, arms)
        return self._next_of_probe(cell, arms) or Choice(cell.arm, cell)

    def observe(self, choice: Choice, seconds: float | None, tokens: Sequence[int]) -> None:
        """A step took so long, and its requests got so many tokens each. None: of no use."""
        cell, arm = choice.cell, choice.arm
        estimate = cell.estimates.setdefault(arm, Estimate())
        estimate.add(cell.visits, seconds, tokens, rough=choice.first)
        if arm == cell.arm and not choice.first:
            cell.drift()
        plain = cell.level(PLAIN)
        if not tokens or plain is None:
            return
        mean, likely = sum(tokens) / len(tokens), estimate.seconds
        self._pay(choice, likely if seconds is None else min(seconds, 3 * likely), mean, plain)
        if seconds is None or choice.probe or arm == PLAIN or arm != cell.arm:
            return
        if mean / seconds >= _LEAST_OF_PLAIN * plain.rate:
            cell.bad_steps.clear()
            return
        cell.bad_steps.append((seconds, tokens))
        if len(cell.bad_steps) >= (_BAD_STEPS if len(tokens) < _LARGE_BATCH else _BAD_STEPS // 2):
            self._retreat(cell)

    def rest(self, choice: Choice) -> int:
        """Plain steps after this one that need no choice and no clock, if they are of its cell: up
        to the last two before the next look, whose time counts."""
        cell = choice.cell
        busy = choice.probe or self._probe is not None or not self._settled
        if choice.arm != PLAIN or busy or not cell.measured(PLAIN):
            return 0
        return max(0, cell.next_look - cell.visits - 2)

    def pass_over(self, cell: Cell, steps: int) -> None:
        """So many steps of a `rest` have been taken."""
        cell.visits += steps
        self._steps += steps
        plain = cell.level(PLAIN)
        if plain is not None and self._credit is not None:
            self._save(_PAID * steps * plain.seconds, cell, plain)

    def fail_passes(self) -> None:
        """Partial passes do not work: they are chosen no more."""
        self._passes_failed, self._probe = True, None

    def rates(self, cell: Cell) -> dict[Arm, float]:
        """Tokens per second of a request, of the arms that were measured in a cell."""
        return {
            arm: estimate.rate
            for arm, estimate in sorted(cell.estimates.items())
            if estimate.count >= ENOUGH
        }

    # ---- the account ----------------------------------------------------------------------------

    def _pay(
        self, choice: Choice, seconds: float, tokens: float, plain: Estimate | Outlook
    ) -> None:
        if self._credit is None:
            self._credit = self._pace.first_credit * plain.seconds
        most = _MOST_FIRST_COST if choice.first else _MOST_COST
        seconds = min(seconds, (most + choice.arm.passes) * plain.seconds)
        saved = _PAID * seconds
        current = choice.cell.level(choice.cell.arm) if choice.probe else None
        if current is not None:
            saved -= seconds - tokens / current.rate - choice.paid
        self._save(saved, choice.cell, plain)

    def _save(self, seconds: float, cell: Cell, plain: Estimate | Outlook) -> None:
        assert self._credit is not None
        known = self._foreseeing and cell.arm == PLAIN and not cell.passes
        most = (_MOST_FORESEEN if known else _MOST_CREDIT) * plain.seconds
        saved = min(self._credit + seconds, most)
        self._credit = max(_LEAST_CREDIT * plain.seconds, saved)

    # ---- decisions ------------------------------------------------------------------------------

    def _look(self, cell: Cell, arms: Sequence[Arm]) -> None:
        """Chooses the cell's arm anew, or starts a probe."""
        interval = self._pace.look_interval
        cell.next_look = cell.visits + interval
        if not cell.alone and cell.visits % _BORROW_INTERVAL <= interval:
            self._cells.borrow(cell, arms)
        found = {arm: outlook for arm in arms if (outlook := cell.outlook(arm)) is not None}
        plain = found.get(PLAIN)
        if plain is None or (plain.error >= 1.0 and not cell.measured(PLAIN)):
            cell.arm = PLAIN
            if self._settled:
                self._probe = _Probe(PLAIN, self._probe_steps, self._pace.slow_first)
            return
        if cell.arm not in found:
            cell.arm = PLAIN
        current = found[cell.arm]
        sure = {arm: o.rate * (1 - o.error) for arm, o in found.items() if arm != cell.arm}
        best = max(sure, key=lambda arm: sure[arm], default=cell.arm)
        if best != cell.arm and sure[best] > _MARGIN * current.rate:
            cell.arm = best
            cell.bad_steps.clear()
            self.switches += 1
        elif self._credit is not None and self._settled:
            self._try_other(cell, arms, found)

    @property
    def _settled(self) -> bool:
        """Whether all steps of the latest probe are known."""
        return self._steps >= self._latest[1] + self._pace.settle_steps

    def _try_other(self, cell: Cell, arms: Sequence[Arm], found: dict[Arm, Outlook]) -> None:
        """Starts a probe of the arm not seen for longest, of those that may be better.

        The account is saved up for it. Meanwhile arms are tried that lose next to nothing.
        """
        assert self._credit is not None
        current, plain = found[cell.arm], found[PLAIN]
        hopes = (self._hope(arm, found) for arm in arms if arm != cell.arm)
        if not cell.arm.passes:
            hopes = (hope and self._foreseen(hope, cell) for hope in hopes)
        turns = [hope for hope in hopes if hope and hope.rate > _MARGIN * current.rate]
        losses, steps = {hope: hope.loss(current.rate) for hope in turns}, self._probe_steps
        free = [
            hope
            for hope in turns
            if steps * losses[hope] <= self._pace.free * plain.seconds
            and hope.rate > _WORTH * current.rate
        ]
        if free:
            best = max(free, key=lambda hope: hope.rate)
            self._begin(best.arm, losses[best], steps, plain)
        elif turns:
            oldest = max(turns, key=lambda hope: hope.expected.age)
            loss, most = losses[oldest], 0.9 * _MOST_CREDIT * plain.seconds
            if self._pace.probe_requests:  # fewer steps, if those can be paid
                steps = min(steps, max(1, int(self._credit / max(loss, 1e-9))))
            if min(steps * loss, most) <= self._credit:
                self._begin(oldest.arm, loss, steps, plain)

    def _hope(self, arm: Arm, found: dict[Arm, Outlook]) -> _Hope | None:
        """None: nothing near the arm is known."""
        known, plain = found.get(arm), found[PLAIN]
        if not arm.passes:
            if known is not None:
                return _Hope(arm, known, known.rate * (1 + known.error))
            return self._hope_of_guesses(arm, found)
        if known is not None and known.age < _FRESH:
            return _Hope(arm, known, known.rate * (1 + known.error))
        age = _NEVER if known is None else known.age
        fresh = {o: f for o, f in found.items() if o.passes and f.age < _FRESH}
        if not fresh:
            return self._hope_of_start(arm, known, plain)
        index = self._with.index(arm)
        if not any(o in fresh for o in self._with[max(0, index - 1) : index + 2]):
            return None
        # Arms of other lengths differ by more than passes: they count where there is nothing else.
        alike = {o.passes: f for o, f in fresh.items() if o.drafts == arm.drafts}
        near = alike or {o.passes: f for o, f in fresh.items()}
        expected, most = _between(arm, near | {0: Outlook(plain.seconds, 1.0, 0.0)})
        return _Hope(arm, expected._replace(age=age), most / expected.seconds)

    def _hope_of_guesses(self, arm: Arm, found: dict[Arm, Outlook]) -> _Hope | None:
        """Of guesses that nobody has tried. More are worth trying if the next fewer were right."""
        plain, index = found[PLAIN], self._without.index(arm)
        if index == 1:
            seconds = self._priced(arm, PLAIN, _FIRST_GUESSES) * plain.seconds
            return _Hope(arm, _FIRST_GUESSES._replace(seconds=seconds), math.inf)
        fewer = self._without[index - 1]
        if fewer not in found:
            return None
        seconds = found[fewer].seconds * self._priced(arm, fewer, _MORE_GUESSES)
        right = found[fewer].tokens - 1.0
        expected = _MORE_GUESSES._replace(
            seconds=seconds, tokens=1.0 + _MORE_GUESSES.tokens * right
        )
        return _Hope(arm, expected, (1.0 + right * arm.drafts / fewer.drafts) / seconds)

    def _foreseen(self, hope: _Hope, cell: Cell) -> _Hope:
        """The same with what is foreseen of guesses. No more is expected than is sure: what loses
        nothing is tried at once."""
        if hope.arm.passes or hope.arm == PLAIN:  # of plain steps the time is what may be doubted
            return hope
        seen = self.foresee(hope.arm.drafts)
        self._foreseeing = seen is not None
        if seen is None:
            return hope
        tokens, error = seen
        doubt = min(hope.expected.age, cell.visits) / _FORESEEN
        rate = (1 + doubt) * (tokens + error) / hope.expected.seconds
        return _Hope(hope.arm, hope.expected._replace(tokens=max(1.0, tokens - error)), rate)

    def _priced(self, arm: Arm, fewer: Arm, otherwise: Outlook) -> float:
        """How many times as long a step takes as one with the next fewer guesses."""
        return otherwise.seconds if self._price is None else self._price(arm, fewer)

    def _hope_of_start(self, arm: Arm, known: Outlook | None, plain: Outlook) -> _Hope | None:
        """Nobody has passed lately: one number of passes stands for all."""
        if [arm] != self._start:
            return None
        if known is not None:
            return _Hope(arm, known, known.rate * (1 + known.error))
        seconds = (_FIRST_BASE + _FIRST_PER_PASS * arm.passes) * plain.seconds
        tokens = 1 + _FIRST_TOKENS_PER_PASS * arm.passes
        return _Hope(arm, Outlook(seconds, tokens, 1.0, _NEVER), math.inf)

    def _begin(self, arm: Arm, loss: float, steps: int, plain: Outlook) -> None:
        """`loss`: seconds that a step is expected to lose."""
        assert self._credit is not None
        latest, end = self._latest
        again = arm == latest and self._steps <= end + 2 * self._pace.settle_steps
        first = self._pace.slow_first and not again
        least = min(0.0, self._credit - steps * loss) - self._pace.most_debt * plain.seconds
        self._probe = _Probe(arm, steps, first, loss, least)

    def _is_over(self, arms: Sequence[Arm]) -> bool:
        probe = self._probe
        if probe is None:
            return False
        broke = self._credit is not None and self._credit < probe.least
        return probe.left == 0 or broke or probe.arm not in arms

    def _end_probe(self) -> None:
        assert self._probe is not None
        self._probe, self._latest = None, (self._probe.arm, self._steps)

    def _next_of_probe(self, cell: Cell, arms: Sequence[Arm]) -> Choice | None:
        """The next step of the probe, if there is one."""
        if self._is_over(arms):
            self._end_probe()
        probe = self._probe
        if probe is None:
            return None
        first, probe.first = probe.first, False
        probe.left -= 1
        if probe.arm == cell.arm:
            return Choice(probe.arm, cell, first=first)
        self.probe_steps += 1
        if self._credit is not None:
            self._credit -= probe.paid
        return Choice(probe.arm, cell, True, first, probe.paid)

    def _retreat(self, cell: Cell) -> None:
        """What was known of the chosen arm does not hold any more, and so it is with the others."""
        chosen = cell.estimates[cell.arm]
        right = chosen.tokens - 1.0
        chosen.doubt()
        for bad in cell.bad_steps:
            chosen.add(cell.visits, *bad)
        left = min(1.0, (chosen.tokens - 1.0) / right) if right > 0 else 0.0
        for arm, estimate in cell.estimates.items():
            if arm.passes and arm != cell.arm:
                estimate.age()
            elif arm not in (PLAIN, cell.arm) and not cell.arm.passes:
                estimate.fade(left)
        cell.arm, cell.alone = PLAIN, True
        cell.bad_steps.clear()
        cell.borrowed.clear()
        self.switches += 1


def _between(arm: Arm, known: dict[int, Outlook]) -> tuple[Outlook, float]:
    """What is expected of an arm between or beside those known by their passes, 0 among them; and
    the most tokens that it can yield."""
    below = sorted(passes for passes in known if passes < arm.passes)
    above = min((passes for passes in known if passes > arm.passes), default=None)
    low = below[-1]
    high = above if above is not None else low
    if above is None:
        low = below[-2]
    one, other = known[low], known[high]
    share = (arm.passes - low) / (high - low)
    seconds = max(one.seconds, one.seconds + share * (other.seconds - one.seconds))
    even = one.tokens + share * (other.tokens - one.tokens)
    even = min(1.0 + arm.drafts, max(1.0, even))
    # Tokens grow ever more slowly: between two arms there may be more than evenly, beyond less.
    return Outlook(seconds, (even + other.tokens) / 2, 1.0), max(even, other.tokens)
