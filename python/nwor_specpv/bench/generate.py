"""`nwor-specpv bench generate`: whole generations, against transformers' own, in one run.

SmolLM2-135M-Instruct, greedy, batch 1, all in turn: transformers' generate, its prompt lookup, and
ours with every drafter over chats and stories; then partial verification over two long contexts.
Tokens are compared with those of plain decoding, in long contexts with those of NWOR alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nwor_specpv.cli.demo.texts import CHAT, STORY, long_prompt
from nwor_specpv.cli.generate import (
    add_model_arguments,
    encode,
    load,
    model_name,
    view_config,
)
from nwor_specpv.cli.parser import Parser, count, count_or_zero
from nwor_specpv.errors import NworError
from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.calls.generation_config import neutral

from .report import add_json_argument, machine, publish

GOALS = {
    "eagle3 / transformers generate": 1.7,
    "eagle3 / transformers prompt lookup": 1.0,
    "rectify / nwor": 1.15,
    "lossless / nwor": 1.0,
}
_LOOKUP = 10  # prompt_lookup_num_tokens, what transformers' documentation shows
Run = Callable[[list[int], int], "Timed"]


class Timed(NamedTuple):
    ids: list[int]
    covered: int  # of these tokens, what was made in `seconds`
    seconds: float
    told: dict[str, Any]


@dataclass
class Samples:
    """Of one way of decoding, over prompts and rounds."""

    tokens: int = 0
    seconds: float = 0.0
    rates: list[float] = field(default_factory=list)
    same: bool = True
    steps: float = 0.0
    stepped: int = 0
    drift: list[float] = field(default_factory=list)

    def add(self, timed: Timed, right: list[int]) -> None:
        told = timed.told
        if timed.covered:
            self.tokens += timed.covered
            self.seconds += timed.seconds
            self.rates.append(timed.covered / timed.seconds)
        self.same &= timed.ids == right
        if told:
            self.steps += told["steps"]
            self.stepped += told["new_tokens"] - told["requests"]
            if told["drift"] is not None:
                self.drift.append(told["drift"])

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "median_tokens_per_second": statistics.median(self.rates),
            "tokens_per_step": self.stepped / self.steps if self.steps else None,
            "same_tokens": self.same,
            "drift": statistics.mean(self.drift) if self.drift else None,
        }


def ours(generator: Generator, *, whole: bool) -> Run:
    """`whole`: prompt and all, by the clock, nothing reused; else decoding alone.

    The first token is the prompt's: decoding begins after it.
    """

    def run(prompt: list[int], count: int) -> Timed:
        if whole:
            generator.forget()
        started = time.perf_counter()
        generation = generator.generate(prompt, count)
        seconds = time.perf_counter() - started
        told = generation.stats.as_dict()
        if whole:
            return Timed(generation.token_ids, told["new_tokens"], seconds, told)
        later = told["new_tokens"] - told["requests"]
        return Timed(generation.token_ids, later, told["decode_seconds"], told)

    return run


def theirs(model: Any, **options: Any) -> Run:
    """Without what the model's generation_config asks for and ours does not do."""
    options = neutral(model) | options

    def run(prompt: list[int], count: int) -> Timed:
        ids = torch.tensor([prompt], device=model.device)
        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            **options,
        )
        seconds = time.perf_counter() - started
        made = out[0, len(prompt) :].tolist()
        return Timed(made, len(made), seconds, {})

    return run


def compare(
    ways: dict[str, Run], prompts: list[list[int]], count: int, rounds: int, plain: Run
) -> dict[str, dict[str, Any]]:
    """Every way over every prompt, in turn; the first round warms up."""
    samples = {name: Samples() for name in ways}
    truths = [plain(prompt, count).ids for prompt in prompts]
    for turn in range(rounds + 1):
        for prompt, right in zip(prompts, truths, strict=True):
            for name, way in ways.items():
                timed = way(prompt, count)
                if turn:
                    samples[name].add(timed, right)
    for name, own in samples.items():
        if not own.rates:
            raise NworError(f"{name}: got no step, expected generations of more than one token")
    return {name: own.as_dict() for name, own in samples.items()}


def long_prompts(tokenizer: Any, num_tokens: int) -> list[list[int]]:
    """A log that is to be gone on with, and another one in a chat, with a question about it."""
    log = tokenizer.decode(long_prompt(tokenizer, num_tokens - 32, seed=2))
    asked = log.removesuffix("Summary:").rstrip()
    return [long_prompt(tokenizer, num_tokens), encode(tokenizer, asked, raw=False)]


def measure(model: Any, tokenizer: Any, arguments: Any) -> dict[str, Any]:
    first = Generator(model, tokenizer, "none")
    drafters = ("none", "ngram", "eagle3")
    own = {name: Generator(drafter=name, cache_of=first) for name in drafters}
    prompts = {
        "chat": [encode(tokenizer, text, raw=False) for text in CHAT],
        "story": [encode(tokenizer, text, raw=True) for text in STORY],
    }
    ways = {
        "transformers generate": theirs(model),
        "transformers prompt lookup": theirs(model, prompt_lookup_num_tokens=_LOOKUP),
        **{name: ours(generator, whole=True) for name, generator in own.items()},
    }
    results = {
        kind: compare(ways, some, arguments.tokens, arguments.rounds, ways["none"])
        for kind, some in prompts.items()
    }
    long: dict[str, dict[str, Any]] = {}
    if arguments.context:
        viewing = {
            mode: Generator(
                drafter="eagle3",
                specpv=view_config(mode, arguments.view_tokens),
                cache_of=first,
            )
            for mode in ("rectify", "refresh", "lossless")
        }
        views = {
            "nwor": ours(own["eagle3"], whole=False),
            **{mode: ours(generator, whole=False) for mode, generator in viewing.items()},
        }
        prompts = long_prompts(tokenizer, arguments.context)
        long = compare(views, prompts, arguments.tokens, arguments.rounds, views["nwor"])
    return {
        **machine(arguments.device),
        "model": model_name(arguments),
        "dtype": arguments.dtype,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "context": arguments.context,
        "view_tokens": arguments.view_tokens,
        "row_costs_ms": {rows: 1000 * cost for rows, cost in first.row_costs.items()},
        "short": results,
        "long": long,
        "ratios": ratios(results, long),
        "goals": GOALS,
    }


def ratios(
    short: dict[str, dict[str, Any]], long: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """By what is run: ours over theirs, and modes over NWOR alone, tokens per second."""
    found: dict[str, dict[str, float]] = {}
    for kind, results in (*short.items(), ("long", long)):
        found[kind] = {}
        for goal in GOALS:
            one, other = goal.split(" / ")
            if one in results and other in results:
                rate = results[one]["tokens_per_second"] / results[other]["tokens_per_second"]
                found[kind][goal] = rate
    return found


def describe(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']}, {report['dtype']}, greedy, batch 1 on {report['device']}, "
        f"torch {report['torch']}, commit {report['revision']}",
        f"{report['tokens']} tokens, {report['rounds']} rounds over every prompt, in turn",
        "",
        f"{'':34}{'tokens/s':>10}{'tokens/step':>13}{'same tokens':>13}{'drift':>8}",
    ]
    sections = [*report["short"].items()]
    if report["long"]:
        sections.append(
            (f"{report['context']} tokens, view {report['view_tokens']}", report["long"])
        )
    for title, results in sections:
        lines.append(title)
        for name, one in results.items():
            step = "-" if one["tokens_per_step"] is None else f"{one['tokens_per_step']:.2f}"
            drift = "-" if one["drift"] is None else f"{one['drift']:.3f}"
            same = "yes" if one["same_tokens"] else "no"
            rate = f"{one['tokens_per_second']:.1f}"
            lines.append(f"  {name:32}{rate:>10}{step:>13}{same:>13}{drift:>8}")
    lines.append("")
    for kind, own in report["ratios"].items():
        for name, value in own.items():
            lines.append(f"{kind}: {name} = {value:.2f} (goal {report['goals'][name]})")
    costs = ", ".join(f"{rows}: {cost:.1f}" for rows, cost in report["row_costs_ms"].items())
    return "\n".join([*lines, f"ms of a step by its rows: {costs}"])


def main(argv: list[str]) -> int:
    parser = Parser(prog="nwor-specpv bench generate", description=__doc__)
    parser.add_argument("--tokens", type=count, default=128, help="new ones of a run, default: 128")
    parser.add_argument("--rounds", type=count, default=2, help="after one to warm up, default: 2")
    parser.add_argument(
        "--context", type=count_or_zero, default=6144, help="of the long prompts; 0: none"
    )
    parser.add_argument(
        "--view-tokens", type=count, default=1024, help="what a partial step sees, default: 1024"
    )
    add_model_arguments(parser)
    add_json_argument(parser)
    arguments = parser.parse_args(argv)
    view_config("rectify", arguments.view_tokens)  # refused before the work
    if arguments.context and arguments.tokens < 2:
        parser.error(f"--tokens: got {arguments.tokens}, expected 2 or more: steps after a prompt")
    model, tokenizer = load(arguments)
    return publish(measure(model, tokenizer, arguments), describe, arguments.json)
