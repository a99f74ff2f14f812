"""Options of generate: the tokens of transformers' own, with drafts and with views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nwor_specpv import NworError
from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.calls.sampling import Sampling
from tests.python.specpv.contexts import seeded
from tests.python.transformers.test_specpv_modes import configured
from tests.python.transformers.tiny_models import (
    TREES,
    VOCAB,
    Oracle,
    decode_plainly,
    random_prompt,
    tiny,
)
from tests.python.transformers.tokenizers_made_here import words

COUNT = 32
Change = Callable[[list[int], torch.Tensor], torch.Tensor]


def by_transformers(prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = tiny().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def one_by_one(prompt: list[int], change: Change, count: int = COUNT) -> tuple[list[int], float]:
    """Tokens whose logits were changed, without a cache; and the least lead of a choice."""
    tokens, lead = list(prompt), float("inf")
    for _ in range(count):
        logits = change(tokens, tiny()(torch.tensor([tokens])).logits[0, -1])
        best = logits.topk(2).values
        lead = min(lead, float(best[0] - best[1]))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], lead


def presence(prompt: int, penalty: float) -> Change:
    def change(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        for token in set(tokens[prompt:]):
            logits[token] -= penalty
        return logits

    return change


def clear_case(low: int, high: int, penalty: float) -> tuple[list[int], list[int]]:
    """A prompt whose tokens under a presence penalty no rounding decides."""
    rng = seeded()
    while True:
        prompt = random_prompt(rng, low, high)
        truth, lead = one_by_one(prompt, presence(len(prompt), penalty))
        if lead > 1e-3:
            return prompt, truth


PROCESSED = {
    "repetition_penalty": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "below one": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "callable": (
        {"logits_processor": NoRepeatNGramLogitsProcessor(2)},
        {"no_repeat_ngram_size": 2},
    ),
    "list": (
        {
            "repetition_penalty": 1.3,
            "logits_processor": LogitsProcessorList(
                [SuppressTokensLogitsProcessor([5, 6, 7, 8]), NoRepeatNGramLogitsProcessor(3)]
            ),
        },
        {
            "repetition_penalty": 1.3,
            "suppress_tokens": [5, 6, 7, 8],
            "no_repeat_ngram_size": 3,
        },
    ),
}


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("tree", TREES)
def test_processors_give_the_tokens_of_transformers_and_drafts_are_accepted(
    name: str, tree: str
) -> None:
    rng = seeded()
    ours, theirs = PROCESSED[name]
    truths: dict[tuple[int, ...], list[int]] = {}
    while len(truths) < 3:  # texts that the option changes
        prompt = random_prompt(rng, 6, 30)
        truth = by_transformers(prompt, **theirs)
        if truth != by_transformers(prompt):
            truths[tuple(prompt)] = truth
    prompts = [*map(list, truths)]
    generator = Generator(tiny(), drafter=Oracle(truths, rng), check_contract=True)
    result = generator.generate(prompts, COUNT, tree=TREES[tree], **ours)
    assert result.token_ids == [truths[tuple(prompt)] for prompt in prompts]
    assert result.stats.accepted > 20
    assert result.stats.violations == []


@pytest.mark.parametrize("penalty", [3.0, -0.5])
def test_a_presence_penalty_counts_the_answers_tokens_along_each_path(penalty: float) -> None:
    prompt, truth = clear_case(6, 30, penalty)
    assert truth != decode_plainly(tiny(), prompt, COUNT)
    generator = Generator(tiny(), drafter=Oracle({tuple(prompt): truth}, seeded()))
    for tree in TREES.values():
        result = generator.generate(prompt, COUNT, tree=tree, presence_penalty=penalty)
        assert result.token_ids == truth
        assert result.stats.accepted > 5


def test_penalties_and_log_probabilities_are_those_of_full_attention_in_lossless_runs() -> None:
    prompt, truth = clear_case(70, 110, 3.0)
    drafter = Oracle({tuple(prompt): truth}, seeded())
    generator = Generator(tiny(), drafter=drafter, specpv=configured("lossless"), pace=False)
    result = generator.generate(
        prompt, COUNT, tree=TREES["tree"], presence_penalty=3.0, return_logprobs=True
    )
    assert result.token_ids == truth
    assert result.stats.step_kinds["partial"] > 0
    assert result.stats.cut_tokens > 0
    torch.testing.assert_close(
        torch.tensor(result.logprobs), own_logprobs(prompt, truth), atol=2e-4, rtol=1e-4
    )


@torch.no_grad()
def own_logprobs(prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = tiny()(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_log_probabilities_are_those_of_the_model(temperature: float) -> None:
    rng = seeded()
    prompts = [random_prompt(rng) for _ in range(3)]
    truths = {tuple(prompt): decode_plainly(tiny(), prompt, COUNT) for prompt in prompts}
    generator = Generator(tiny(), drafter=Oracle(truths, rng))
    options = {"tree": TREES["tree"], "repetition_penalty": 1.2, "seed": 3}
    result = generator.generate(prompts, COUNT, temperature, return_logprobs=True, **options)
    for prompt, answer, told in zip(prompts, result.token_ids, result.logprobs, strict=True):
        expected = own_logprobs(prompt, answer)
        torch.testing.assert_close(torch.tensor(told), expected, atol=2e-4, rtol=1e-4)
    stop = result.token_ids[0][3]
    ended = generator.generate(
        prompts[0], COUNT, temperature, stop=stop, return_logprobs=True, **options
    )
    assert len(ended.logprobs) == len(ended.token_ids)
    assert generator.generate(prompts[0], 3).logprobs is None


def test_min_p_leaves_the_probabilities_that_transformers_leaves() -> None:
    rng = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(2, 4, VOCAB, generator=rng)
    for temperature, top_k, top_p, min_p in ((1.0, 0, 1.0, 0.1), (0.7, 20, 0.9, 0.05)):
        scores = logits.flatten(0, 1)
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        for warper in (*warpers, MinPLogitsWarper(min_p)):
            scores = warper(None, scores)
        ours = Sampling(temperature, top_k, top_p, min_p).probabilities(logits)
        torch.testing.assert_close(ours.flatten(0, 1), scores.softmax(-1))


def test_a_min_p_of_one_is_greedy() -> None:
    prompt = random_prompt(seeded())
    generator = Generator(tiny(), drafter="ngram")
    truth = decode_plainly(tiny(), prompt, COUNT)
    assert generator.generate(prompt, COUNT, 1.0, min_p=1.0, seed=1).token_ids == truth


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
def test_stop_strings_end_where_transformers_ends(tree: str) -> None:
    rng = seeded()
    tokenizer, truth = words(), [0]
    while 0 in truth:  # which pads, and is no text
        prompt = random_prompt(rng, 6, 30)
        truth = decode_plainly(tiny(), prompt, COUNT)
    generator = Generator(tiny(), tokenizer, Oracle({tuple(prompt): truth}, rng))
    for at in (0, 1, 9, 20):
        string = tokenizer.decode(truth[at : at + 2])
        theirs = by_transformers(prompt, stop_strings=[string], tokenizer=tokenizer)
        result = generator.generate(prompt, COUNT, stop=["never", string], tree=TREES[tree])
        assert result.token_ids == theirs
        assert result.finish == "stop"
        assert result.text == tokenizer.decode(theirs).partition(string)[0]
        assert len(result.depths) == len(result.token_ids)
    assert generator.generate(prompt, COUNT, stop="never").token_ids == truth


def test_stop_takes_ids_and_strings_together() -> None:
    rng = seeded()
    tokenizer, prompt = words(), random_prompt(rng, 6, 30)
    truth = decode_plainly(tiny(), prompt, COUNT)
    generator = Generator(tiny(), tokenizer, "none")
    for stop in (truth[4], [truth[4]], torch.tensor([truth[4]]), ["never", truth[4]]):
        result = generator.generate(prompt, COUNT, stop=stop)
        assert result.token_ids == truth[: truth.index(truth[4]) + 1]
        assert result.finish == "stop"


# ---- several sequences ---------------------------------------------------------------------------


def test_several_sequences_of_a_prompt_are_those_of_its_seeds() -> None:
    rng = seeded()
    prompts = [random_prompt(rng) for _ in range(2)]
    generator = Generator(tiny(), drafter="ngram")
    told = generator.generate(prompts, 12, 0.9, seed=5, num_return_sequences=3)
    assert len(told.token_ids) == 6
    for i in range(6):
        alone = generator.generate(prompts[i // 3], 12, 0.9, seed=5 + i)
        assert told.token_ids[i] == alone.token_ids
    one = generator.generate(prompts[0], 12, 0.9, seed=5, num_return_sequences=3)
    assert one.token_ids == told.token_ids[:3]


# ---- chats ---------------------------------------------------------------------------------------


def test_messages_become_what_the_template_makes_of_them() -> None:
    tokenizer = words(chat=True)
    generator = Generator(tiny(), tokenizer, "none")
    chat = [{"role": "user", "content": "w5;w6;"}, {"role": "assistant", "content": "w7;"}]
    expected = decode_plainly(tiny(), [90, 5, 6, 91, 90, 7, 91, 92], 8)
    assert generator.generate(chat, 8).token_ids == expected
    assert generator.generate([chat, chat[:1]], 8).token_ids == [
        expected,
        decode_plainly(tiny(), [90, 5, 6, 91, 92], 8),
    ]
    with pytest.raises(NworError, match="chat template refused the messages: no system turns"):
        generator.generate([{"role": "system", "content": "w1;"}], 8)


# ---- wrong values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty: got 0, expected above 0"),
        ({"repetition_penalty": "x"}, "repetition_penalty: got 'x', expected a finite number"),
        ({"presence_penalty": float("nan")}, "presence_penalty: got nan, expected a finite"),
        ({"min_p": 1.5}, r"min_p: got 1.5, expected 0 \(all\) to 1"),
        ({"min_p": None}, "min_p: got None, expected a number"),
        ({"logits_processor": [3]}, "logits_processor: got 3, expected functions of ids"),
        ({"logits_processor": lambda ids, logits: None}, "logits_processor: got .*NoneType"),
        ({"logits_processor": lambda ids, logits: logits[:, 1:]}, r"logits_processor: got \[1, 95"),
        ({"logits_processor": lambda ids, logits: logits * float("nan")}, "logits: got NaN"),
        ({"stop": ""}, "stop: got '', expected strings that are not empty, or ids from 0 to 95"),
        ({"stop": [96]}, "stop: got 96, expected strings"),
        ({"stop": "w1"}, "stop: got 'w1' without a tokenizer"),
        ({"num_return_sequences": 0}, "num_return_sequences: got 0, expected 1 or more"),
        ({"num_return_sequences": 2}, "num_return_sequences: got 2 at temperature 0"),
        ({"streamer": 3}, "streamer: got int, expected a streamer of transformers"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], message: str) -> None:
    generator = Generator(tiny(), drafter="none")
    with pytest.raises(NworError, match=message) as told:
        generator.generate([1, 2], 4, **options)
    assert "\n" not in str(told.value)
    assert len(generator.generate([1, 2], 2).token_ids) == 2


def test_a_processor_gets_the_tokens_of_its_row() -> None:
    """Each call: ids of rows with equally many tokens, the row's own last."""
    prompt = random_prompt(seeded(), 6, 20)
    truth = by_transformers(prompt, repetition_penalty=1.5)
    seen: list[tuple[int, ...]] = []

    def watched(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert ids.shape[0] == logits.shape[0]
        seen.extend(map(tuple, ids.tolist()))
        return RepetitionPenaltyLogitsProcessor(1.5)(ids, logits)

    generator = Generator(tiny(), drafter=Oracle({tuple(prompt): truth}, seeded()))
    result = generator.generate(prompt, COUNT, tree=TREES["tree"], logits_processor=watched)
    assert result.token_ids == truth
    whole = tuple(prompt + truth)
    assert {whole[:end] for end in range(len(prompt), len(whole))} <= set(seen)
