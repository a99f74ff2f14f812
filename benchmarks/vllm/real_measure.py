"""Measures one cell of real.py on a running engine.

All requests arrive at once. Prompts are computed in equal pieces, so that all of them are done in
the same step or the next. The cut is the moment when every request has its first token. Some tokens
after it are not counted, then the clock runs until the requests have got `tokens` more on average,
or the first of them has ended, or time is up. Nothing but decoding lies between these two points:
the clock stands while another side measures.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from turns import Turns

PERCENTILES = {"p50": 0.5, "p99": 0.99}
_REPEAT = 8  # tokens: a run of so many that was there before counts as repetition
_SLICE_S = 0.1  # of decoding between two turns of others


@dataclass(frozen=True)
class Size:
    """How much of a cell is measured."""

    tokens: int  # of a request, on average
    warm_tokens: int  # of a request before, not counted
    seconds: float  # at most

    @property
    def room(self) -> int:
        """Tokens of a cell's context that are an answer's: some requests get more tokens of a step
        than others."""
        return 4 * (self.tokens + self.warm_tokens)

    @property
    def most(self) -> int:
        """Tokens of an answer at most, which ends the measurement: one that repeats itself may be
        far ahead of the others."""
        return 3 * self.room


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each output
    sizes: list[int] = field(default_factory=list)  # tokens of each output
    cached: int = 0  # tokens of the prompt that were in the prefix cache
    second_best: list[tuple[int, float]] = field(default_factory=list)  # token, by how much


class Drafts:
    """Counts the drafts that vLLM verifies and accepts, where the scheduler is in this process."""

    def __init__(self, llm: Any) -> None:
        self.drafted = self.accepted = 0
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        if core is None:
            return
        scheduler = core.scheduler
        make = scheduler.make_spec_decoding_stats

        def counted(
            stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any
        ) -> Any:
            self.drafted += num_draft_tokens
            self.accepted += num_accepted_tokens
            return make(
                stats,
                num_draft_tokens=num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                **more,
            )

        scheduler.make_spec_decoding_stats = counted


class Arms:
    """What the plugin's scheduler chooses for each step, and what it measures of it, where it is in
    this process."""

    def __init__(self, llm: Any) -> None:
        self.taken: Counter[str] = Counter()
        self.measured: list[tuple[str, float, float]] = []  # arm, ms, tokens of a request
        self.rested = False  # since the last step: its time is none
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        decisions = getattr(core and core.scheduler, "decisions", None)
        if decisions is None:
            return
        decide = decisions.decide

        def counted(*args: Any) -> Any:
            arm = decide(*args)
            self.taken[str(arm)] += 1
            return arm

        decisions.decide = counted
        observe = decisions.choice.observe

        def noted(choice: Any, seconds: float | None, tokens: Sequence[int]) -> None:
            seconds, self.rested = None if self.rested else seconds, False
            observe(choice, seconds, tokens)
            if seconds is not None and tokens:
                measured = str(choice.arm), 1e3 * seconds, statistics.fmean(tokens)
                self.measured.append(measured)

        decisions.choice.observe = noted


class Clock:
    """Seconds that this side has had."""

    def __init__(self, turns: Turns | None) -> None:
        self._turns, self._waited, self._began = turns, 0.0, 0.0

    def now(self) -> float:
        return time.perf_counter() - self._waited

    def begin(self) -> None:
        self._began = self.now()

    def rest(self) -> bool:
        """Passes the turn on if this one is over, when the device has done what it was given."""
        if self._turns is None or self.now() - self._began < _SLICE_S:
            return False
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        left = time.perf_counter()
        self._turns.pass_on()
        self._waited += time.perf_counter() - left
        self.begin()
        return True


class Bench:
    """Runs cells on one engine. Thread-safety: none."""

    def __init__(
        self, llm: Any, ends: Sequence[int], *, plugin: bool, turns: Turns | None = None
    ) -> None:
        self._clock = Clock(turns)
        self._engine = llm.llm_engine
        self._core = getattr(self._engine.engine_core, "engine_core", None)
        self._drafts, self._arms = Drafts(llm), Arms(llm)
        self._ends = set(ends)
        self._plugin = plugin and self._core is not None  # its counters are in this process
        self._number = 0

    def run(
        self,
        prompts: Sequence[list[int]],
        temperature: float,
        size: Size,
        *,
        logprobs: bool = False,
    ) -> dict[str, Any]:
        """What is measured of one batch; see the top of this file."""
        self.even_prefill(len(prompts))
        began = self._clock.now()
        answers = self.add(prompts, temperature, size, logprobs=logprobs)
        while not all(answer.tokens for answer in answers.values()):
            self.step(answers)
        first = [answer.times[0] - began for answer in answers.values()]
        self._decode(answers, size.warm_tokens, size.seconds)
        before, drafted, accepted = self._counts(), self._drafts.drafted, self._drafts.accepted
        arms, measured = self._arms.taken.copy(), len(self._arms.measured)
        starts = {name: len(answer.times) for name, answer in answers.items()}
        lens = {name: len(answer.tokens) for name, answer in answers.items()}
        self._clock.begin()
        start = self._clock.now()
        steps, stopped = self._decode(answers, size.tokens, size.seconds, rests=True)
        told = {"stopped": stopped, "tokens": size.tokens, "warm_tokens": size.warm_tokens}
        told |= timing(answers, starts, start, steps)
        told |= self._drafting(before, drafted, accepted, len(steps))
        if self._arms.taken:
            told["arms"] = dict(self._arms.taken - arms)
            told["arm_steps"] = self._arms.measured[measured:]
        told |= content([a.tokens for a in answers.values()], list(lens.values()), self._ends)
        cached = sum(answer.cached for answer in answers.values())
        told["cached"] = cached / sum(map(len, prompts))
        told["first_token_s"] = {} if cached else spread(first)
        self.finish(list(answers))
        told["wall_s"] = self._clock.now() - began
        kept = size.warm_tokens + size.tokens
        if temperature == 0:
            told["outputs"] = [answer.tokens[:kept] for answer in answers.values()]
        if logprobs:
            told["second_best"] = [answer.second_best[:kept] for answer in answers.values()]
        return told

    def even_prefill(self, requests: int) -> None:
        if self._core is not None:
            config = self._core.scheduler.scheduler_config
            config.long_prefill_token_threshold = max(16, config.max_num_batched_tokens // requests)

    def add(
        self, prompts: Sequence[list[int]], temperature: float, size: Size, *, logprobs: bool
    ) -> dict[str, Answer]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        longest = self._engine.vllm_config.model_config.max_model_len
        params = SamplingParams(
            temperature=temperature,
            max_tokens=min(size.most, longest - max(map(len, prompts))),
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if logprobs else None,
            output_kind=RequestOutputKind.DELTA,
        )
        self._number += 1
        answers = {}
        for index, prompt in enumerate(prompts):
            name = f"{self._number}-{index}"
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            answers[name] = Answer()
        return answers

    def step(self, answers: dict[str, Answer]) -> tuple[float, int, bool]:
        """One step: when its outputs came, their tokens, and whether a request has ended."""
        outputs = self._engine.step()
        now, tokens, ended = self._clock.now(), 0, False
        for output in outputs:
            answer, made = answers[output.request_id], output.outputs[0]
            ended = ended or output.finished
            if not made.token_ids:
                continue
            tokens += len(made.token_ids)
            answer.tokens += made.token_ids
            answer.times.append(now)
            answer.sizes.append(len(made.token_ids))
            answer.cached = output.num_cached_tokens or 0
            for token, entries in zip(made.token_ids, made.logprobs or (), strict=False):
                best, other = max((e.logprob, i) for i, e in entries.items() if i != token)
                answer.second_best.append((other, round(entries[token].logprob - best, 5)))
        return now, tokens, ended

    def finish(self, names: list[str]) -> None:
        """Ends requests."""
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests() or getattr(self._core, "batch_queue", None):
            self._engine.step()

    def _decode(
        self, answers: dict[str, Answer], tokens: int, seconds: float, *, rests: bool = False
    ) -> tuple[list[float], str]:
        """Steps until requests have `tokens` more on average: times of outputs, why it stopped.
        `rests`: others have their turns meanwhile."""
        missing, times = tokens * len(answers), []
        limit = self._clock.now() + seconds
        while missing > 0:
            self._arms.rested |= rests and self._clock.rest()
            now, made, ended = self.step(answers)
            if made:
                times.append(now)
                missing -= made
            if ended:
                return times, "a request has ended"
            if now > limit:
                return times, "time is up"
        return times, ""

    def _counts(self) -> dict[str, Any]:
        if not self._plugin:
            return {}
        from nwor_specpv import Metrics

        return Metrics().snapshot()

    def _drafting(
        self, before: dict[str, Any], drafted: int, accepted: int, steps: int
    ) -> dict[str, Any]:
        """Of vLLM's scheduler: drafts verified and accepted. Of the plugin: passes, failures."""
        if self._core is None:
            return {}
        told: dict[str, Any] = {
            "drafted": self._drafts.drafted - drafted,
            "accepted": self._drafts.accepted - accepted,
        }
        if not before:
            return told
        now, name = self._counts(), "specpv_draft_failures_total"
        failures = {why: n - before[name].get(why, 0) for why, n in now[name].items()}
        passes = now["specpv_draft_passes_total"] - before["specpv_draft_passes_total"]
        told["passes_per_step"] = passes / max(1, steps)
        for kind in ("drafted", "confirmed"):
            key = f"specpv_{kind}_tokens_total"
            told[f"views_{kind}"] = now[key] - before[key]
        for kind in ("probe_steps", "arm_switches"):
            key = f"specpv_{kind}_total"
            told[kind] = now[key] - before[key]
        return told | {"draft_failures": {why: n for why, n in failures.items() if n}}


def timing(
    answers: dict[str, Answer], starts: dict[str, int], start: float, steps: Sequence[float]
) -> dict[str, Any]:
    """Times of the outputs after `starts` (how many each request had before), in ms."""
    tokens = outputs = 0
    gaps, shares = [], []
    for name, answer in answers.items():
        for number in range(starts[name], len(answer.times)):
            gap = 1e3 * (answer.times[number] - answer.times[number - 1])
            size = answer.sizes[number]
            gaps.append(gap)
            shares += [gap / size] * size
            tokens, outputs = tokens + size, outputs + 1
    ends = [start, *steps]
    step_ms = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    seconds = steps[-1] - start if steps else 0.0
    return {
        "steps": len(steps),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "step_ms": spread(step_ms),
        "tokens_per_step": tokens / outputs if outputs else 0.0,
        "output_gap_ms": spread(gaps),
        "token_ms": spread(shares),
    }


def content(
    answers: Sequence[list[int]], starts: Sequence[int], ends: set[int]
) -> dict[str, float]:
    """Shares of the measured tokens that come after an end of text, and that repeat the answer."""
    total = after = repeated = 0
    for tokens, start in zip(answers, starts, strict=True):
        seen: set[tuple[int, ...]] = set()
        ended = False
        for index, token in enumerate(tokens):
            run = tuple(tokens[max(0, index + 1 - _REPEAT) : index + 1])
            if index >= start:
                total += 1
                after += ended
                repeated += run in seen
            ended = ended or token in ends
            if len(run) == _REPEAT:
                seen.add(run)
    return {"after_end": after / max(1, total), "repeated": repeated / max(1, total)}


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    told = {name: percentile(values, share) for name, share in PERCENTILES.items()}
    return {"mean": statistics.fmean(values)} | told
