"""A made-up engine around the choice of arms: what steps take and yield is given by a function."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from nwor_specpv.arms import Arm, ArmChoice, Choice, make_arms
from nwor_specpv.vllm.scheduling.step_clock import StepClock

LIMIT, GUESSES = 16, 4


@dataclass(frozen=True)
class World:
    """Seconds of steps, and how often a draft stands."""

    plain: float = 5e-3  # a step of one row
    row: float = 0.03  # share of it, for each further row
    pass_: float = 0.4  # share of it, for each pass
    agreement: float = 0.9  # of what passes confirm
    guess: float = 0.5  # of guesses that nobody has confirmed
    per_pass: float = 2.5  # tokens that a pass adds
    noise: float = 0.02
    outliers: float = 0.0
    first: float = 0.0  # seconds more of an arm's first step: kernels are loaded, memory is taken

    def seconds(self, arm: Arm, scale: float = 1.0) -> float:
        return self.plain * scale * (1 + self.row * arm.drafts + self.pass_ * arm.passes)

    def survival(self, arm: Arm) -> list[float]:
        """The chance of each draft to stand if all before it do."""
        chain = min(arm.drafts, int(arm.passes * self.per_pass))
        behind = min(arm.drafts - chain, GUESSES if arm.passes else arm.drafts)
        return [self.agreement] * chain + [self.guess] * behind

    @functools.cache  # noqa: B019
    def stands(self, arm: Arm) -> list[float]:
        """The chance that so many drafts stand: of all of them first, of one last."""
        return list(itertools.accumulate(self.survival(arm), operator.mul))[::-1]

    def emitted(self, arm: Arm, draw: float) -> int:
        """Tokens of a step, by a draw from 0 to 1."""
        stands = self.stands(arm)
        return 1 + len(stands) - bisect.bisect(stands, draw)

    def tokens(self, arm: Arm) -> float:
        """Of a request, on average."""
        return 1 + sum(self.stands(arm))

    def rate(self, arm: Arm) -> float:
        return self.tokens(arm) / self.seconds(arm)

    def best(self, choice: ArmChoice) -> Arm:
        return max(choice.arms, key=self.rate)


@dataclass(frozen=True)
class MeasuredWorld(World):
    """Plain steps and guesses that were measured: seconds of a step, and tokens of a request."""

    measured: tuple[tuple[Arm, float, float], ...] = ()
    further: float = 0.8  # how often a draft stands behind one that does

    def seconds(self, arm: Arm, scale: float = 1.0) -> float:
        found = {known: seconds for known, seconds, _ in self.measured}
        return scale * found[arm] if arm in found else super().seconds(arm, scale)

    def survival(self, arm: Arm) -> list[float]:
        right = {known: tokens - 1.0 for known, _, tokens in self.measured}.get(arm, 0.0)
        behind = [self.further] * (arm.drafts - 1)
        return [right / sum(itertools.accumulate([1.0, *behind], operator.mul)), *behind]

    __hash__ = World.__hash__


@dataclass
class Scout:
    """A text in which lookups guess: their latest trials, 32 tokens of them and three at least."""

    trials: list[tuple[float, World]] = field(default_factory=list)
    left: float = 0.0  # tokens of the trial that is not over

    def follow(self, world: World, tokens: float, rng: random.Random) -> None:
        self.left -= tokens
        while self.left <= 0:
            self.trials.append((rng.random(), world))
            sizes = [world.emitted(Arm(LIMIT, 0), draw) for draw, world in self.trials]
            while len(sizes) > 3 and sum(sizes[1:]) >= 32:
                del self.trials[0], sizes[0]
            self.left += sizes[-1]


@dataclass
class Run:
    """What was served, and what it took: really, by plain steps alone, by the best arm alone."""

    seconds: float = 0.0
    plain: float = 0.0
    best: float = 0.0
    taken: dict[Arm, int] = field(default_factory=dict)

    @property
    def of_plain(self) -> float:
        return self.plain / self.seconds

    @property
    def of_best(self) -> float:
        return self.best / self.seconds


class Engine:
    """Asynchronous: a step is scheduled before the last one's output is there."""

    def __init__(
        self,
        choice: ArmChoice | None = None,
        seed: int = 0,
        *,
        late: bool = False,
        foresees: bool = False,
        rests: bool = True,
    ) -> None:
        """`late`: the host is the slower one, so that times shift to the next step. `foresees`: the
        texts of eight requests say how many guesses would be right. `rests`: plain steps between
        two looks are taken as they come."""
        self.choice = choice or ArmChoice(make_arms(LIMIT, GUESSES, long_guesses=True))
        self.random, self.late = random.Random(seed), late
        self._clock, self._now = StepClock(), 0.0
        self._arms: list[Arm] = []
        self._begun: set[Arm] = set()
        self._pending: tuple[object | None, float, list[int]] | None = None
        self._may_rest = rests
        self._rest: tuple[Choice, int, int] | None = None  # like which, so many taken, to come
        self._batch = 0
        self._scouts = [Scout() for _ in range(8)] if foresees else []
        if foresees:
            self.choice.foresee = self._foresee

    def _foresee(self, drafts: int) -> tuple[float, float] | None:
        """As the scouts of `vllm/specpv/scouts.py` tell it."""
        if any(len(scout.trials) < 3 for scout in self._scouts):
            return None
        means = [fmean(world.emitted(Arm(drafts, 0), draw) for draw, world in scout.trials)
                 for scout in self._scouts]  # fmt: skip
        return fmean(means), pstdev(means) / len(means) ** 0.5

    def serve(
        self,
        world: World,
        steps: int,
        batch: Callable[[int], int] = lambda _: 16,
        context: Callable[[int], float] = lambda _: 8192.0,
        passes: bool = True,
        slow: float = 1.0,
    ) -> Run:
        """`slow`: times are so many times as long."""
        run = Run()
        best = world.best(self.choice)
        if not passes:
            best = max((arm for arm in self.choice.arms if not arm.passes), key=world.rate)
        for number in range(steps):
            count, length = batch(number), context(number)
            chosen, output = self._choose(count, length, passes=passes)
            self._arms.append(chosen.arm)
            run.taken[chosen.arm] = run.taken.get(chosen.arm, 0) + 1
            self._finish()
            arm = self._arms[max(0, len(self._arms) - 2)]  # its drafts are verified now
            emitted = [world.emitted(arm, self.random.random()) for _ in range(count)]
            for scout in self._scouts:
                scout.follow(world, sum(emitted) / count, self.random)
            timed = chosen.arm if self.late else arm
            # Times grow with batch and context, as those of a real engine do.
            scale = (0.5 + count / 32) * (0.5 + length / 16384)
            scale *= slow * self.random.lognormvariate(0, world.noise)
            if self.random.random() < world.outliers:
                scale *= self.random.uniform(3, 12)
            spent = world.seconds(timed, scale)
            if timed not in self._begun:
                self._begun.add(timed)
                spent += world.first
            self._now += spent
            self._pending = (output, self._now, emitted)
            tokens = sum(emitted) / count
            run.seconds += spent
            run.plain += tokens * world.seconds(self.choice.arms[0], scale)
            run.best += tokens / world.rate(best) * scale
        return run

    def _choose(self, count: int, length: float, *, passes: bool) -> tuple[Choice, object | None]:
        """As `Decisions.decide`: steps of a rest are taken as they come, and have no name."""
        if self._rest is not None:
            like, taken, left = self._rest
            if left and count == self._batch:
                self._rest = like, taken + 1, left - 1
                return like, None
            self.choice.pass_over(like.cell, taken)
        chosen, output = self.choice.choose(count, length, passes=passes), object()
        self._clock.scheduled(output, chosen, self._now, measurable=True)
        if self._may_rest:
            self._rest, self._batch = (chosen, 0, self.choice.rest(chosen)), count
        return chosen, output

    def _finish(self) -> None:
        if self._pending is not None:
            output, ended, emitted = self._pending
            if output is None:
                self._clock.pause()
                return
            found = self._clock.finished(output, ended)
            if found is not None:
                self.choice.observe(*found, emitted)
