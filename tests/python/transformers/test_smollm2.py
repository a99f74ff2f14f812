"""The default model: every mode that claims it says what plain decoding says, token for token.

The quick tests take two prompts; the sweep (slow) takes thirty with 200 tokens each. The contract
checker looks at the whole cache around every step of all of them.
"""

from __future__ import annotations

import copy
import os
from functools import cache
from typing import Any

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.cli.demo.texts import CHAT, CODE, STORY, long_prompt
from nwor_specpv.cli.generate import encode, view_config
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.models import smollm2
from nwor_specpv.transformers import Generator, load_model

NUM_PROMPTS = int(os.environ.get("NWOR_SWEEP_PROMPTS") or 30)
NEW_TOKENS = 200
PART = 8  # prompts of one test, so that tests can run side by side
PARTS = range(0, NUM_PROMPTS, PART)
TOPICS = (
    "Why is the sky blue?",
    "List five uses of an old newspaper.",
    "Explain photosynthesis to a child.",
    "Write a poem about the sea.",
    "What should I pack for a week in the mountains?",
    "Tell me about the history of bread.",
    "How do I learn to play the guitar?",
    "Describe your favourite season and why people like it.",
    "What is a prime number? Give examples.",
    "Write an email asking for a day off.",
    "How does a bicycle stay upright?",
    "Summarise the story of Cinderella.",
    "Give tips for sleeping better.",
    "What is the difference between weather and climate?",
    "Invent a name for a bakery and explain it.",
    "How are mountains made?",
    "Explain what a computer program is.",
    "What do bees do in winter?",
    "Write a dialogue between a cat and a dog.",
    "How do you make pancakes?",
)


@cache
def loaded() -> tuple[Any, Any]:
    try:
        smollm2()
    except NworError as error:  # no network, and the weights are not installed
        pytest.skip(f"SmolLM2-135M-Instruct is not here: {error}")
    return load_model()


@cache
def prompts() -> list[list[int]]:
    _, tokenizer = loaded()
    found = [encode(tokenizer, text, raw=False) for text in (*CHAT, *TOPICS)]
    found += [encode(tokenizer, text, raw=True) for text in (*STORY, *CODE)]
    # Longer than the views of the tests below, and one that changes its topic at the end.
    found += [long_prompt(tokenizer, count, seed) for count, seed in ((400, 2), (700, 3))]
    turn = "\n\nNow something else: a list of prime numbers below 60: 2, 3, 5, 7,"
    found.append(long_prompt(tokenizer, 350, 4) + tokenizer(turn).input_ids)
    return found[-NUM_PROMPTS:]


@cache
def plain() -> Generator:
    return Generator(*loaded(), drafter="none")


@cache
def checked() -> Generator:
    """Every step of it, and of all that share its cache, is watched. The checker reads the whole
    cache around a step, so this one stays as small as its prompts."""
    return Generator(*loaded(), drafter="none", check_contract=True)


@cache
def truths(first: int) -> list[list[int]]:
    """How the prompts of a part go on. They run side by side: in float32 a row's bits are the same
    whatever is beside it, which `test_a_part_says_what_its_prompts_say_alone` holds it to."""
    return plain().generate(part(first), NEW_TOKENS).token_ids


def part(first: int) -> list[list[int]]:
    return prompts()[first : first + PART]


@cache
def truth(index: int, count: int) -> list[int]:
    result = checked().generate(prompts()[index], count)
    assert result.stats.violations == []
    return result.token_ids


def small_view(mode: str):
    config = view_config(mode, 11 * 16, tail_tokens=24)
    config.specpv_n_window_blocks = 4
    return config


MODES = {
    "ngram": {"drafter": "ngram"},
    "chunks": {"drafter": "ngram"},
    "draft_model": {"drafter": "draft_model"},
    "eagle3": {"drafter": "eagle3"},
    "lossless": {"drafter": "eagle3", "specpv": "lossless"},
}
# Chains of sixteen drafts, four rows at a time.
CALLS = {"chunks": {"tree": TreeConfig(rows=17, depth=16, top_k=1), "chunk_rows": 4}}


@cache
def generator(mode: str) -> Generator:
    options = dict(MODES[mode])
    if "specpv" in options:
        options["specpv"] = small_view(options["specpv"])
        options["pace"] = False  # views all the way, whether they pay or not
    if mode == "draft_model":
        options["draft_model"] = first_layers(2)
    return Generator(cache_of=checked(), **options)


@cache
def first_layers(count: int) -> Any:
    """A smaller model of the same vocabulary: it drafts at once, and mostly wrong."""
    model, _ = loaded()
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    config.layer_types = None
    smaller = type(model)(config).eval()
    weights = {n: w for n, w in model.state_dict().items() if n in smaller.state_dict()}
    smaller.load_state_dict(weights)
    return smaller


def test_plain_decoding_is_that_of_transformers() -> None:
    model, _ = loaded()
    prompt = prompts()[0]
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    assert truth(0, 24) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", ["ngram", "eagle3", "lossless"])
def test_every_mode_says_what_plain_decoding_says(mode: str) -> None:
    for index in (0, len(prompts()) - 1):
        result = generator(mode).generate(prompts()[index], 16, **CALLS.get(mode, {}))
        assert result.token_ids == truth(index, 24)[:16]
        assert result.stats.violations == []


def test_the_shipped_head_is_worth_its_rows() -> None:
    # A size that is given: which one is chosen is a matter of the machine's load.
    stats = generator("eagle3").generate(prompts()[0], 24, tree=TreeConfig(rows=8)).stats
    assert stats.tokens_per_step > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("first", PARTS)
def test_a_part_says_what_its_prompts_say_alone(first: int) -> None:
    for index in (0, len(part(first)) - 1):
        assert truths(first)[index] == truth(first + index, NEW_TOKENS), f"prompt {first + index}"


@pytest.mark.slow
@pytest.mark.parametrize("first", PARTS)
@pytest.mark.parametrize("mode", MODES)
def test_sweep_one_by_one(mode: str, first: int) -> None:
    for index, prompt in enumerate(part(first)):
        result = generator(mode).generate(prompt, NEW_TOKENS, **CALLS.get(mode, {}))
        assert result.token_ids == truths(first)[index], f"prompt {first + index}"
        assert result.stats.violations == []


@pytest.mark.slow
@pytest.mark.parametrize("first", PARTS)
@pytest.mark.parametrize("mode", MODES)
def test_sweep_in_batches_of_four(mode: str, first: int) -> None:
    for begin in range(0, len(part(first)), 4):
        batch = part(first)[begin : begin + 4]
        result = generator(mode).generate(batch, NEW_TOKENS, **CALLS.get(mode, {}))
        expected = truths(first)[begin : begin + 4]
        assert result.token_ids == expected, f"prompts from {first + begin}"
        assert result.stats.violations == []


@pytest.mark.slow
@pytest.mark.parametrize("first", PARTS)
def test_sweep_of_stops_inside_accepted_runs(first: int) -> None:
    made = generator("eagle3")
    for index, prompt in enumerate(part(first)[::2]):
        right = truths(first)[2 * index]
        for at in (3, 17, 40):
            if at >= len(right):
                continue
            end = right.index(right[at])
            result = made.generate(prompt, NEW_TOKENS, eos_token_id=right[at])
            assert result.token_ids == right[: end + 1]
            assert result.finish == "stop"
            assert result.stats.violations == []
