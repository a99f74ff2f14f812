"""SmolLM2-135M in float32: twenty prompts, token for token what vLLM gives without the plugin."""

from __future__ import annotations

import pytest

from nwor_specpv.models import smollm2
from support.engine_process import run_job
from support.engines import NGRAM, STAGED, counted, drive, greedy, own_engine, start
from support.engines import stats as own_stats
from support.installed import PAGE

pytestmark = [pytest.mark.serves("staging", "V1"), pytest.mark.slow]

MAX_TOKENS = 64
QUESTIONS = (
    "What is the capital of France? Tell me two facts about it.",
    "Write a short story about a dog. Then repeat the story exactly, word for word.",
    "List the numbers from 1 to 40, separated by commas. Then list them again.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
    "Explain why the sky is blue in two sentences.",
    "Give me a recipe for pancakes as a numbered list.",
    "Write a Python function that adds two numbers, then the same function again.",
    "What is 2 + 2? Answer in one word.",
    "Name ten animals, one per line. Then name them again in the same order.",
    "Translate 'good morning' into French, German and Spanish.",
    "Who wrote Romeo and Juliet?",
    "Write the alphabet twice.",
    "Summarise: the cat sat on the mat, the cat sat on the mat, the cat sat on the mat.",
    "Describe the water cycle.",
    "Write a haiku about the sea, and then write it once more.",
    "What are the primary colours?",
    "Count down from twenty to one.",
    "Write a JSON object with the keys name, age and city. Then write it again.",
    "Tell me a joke about a programmer.",
    "Spell the word 'banana' letter by letter, three times.",
)


def prompts() -> list[str]:
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [turn.format(question) for question in QUESTIONS]


def options(**more: object) -> dict:
    """The same for both sides."""
    return {
        "model": str(smollm2("float32")),
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
    } | more


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """From a vLLM that has never heard of us, with the same speculation."""
    job = {"start": options(nwor={}), "prompts": prompts(), "max_tokens": MAX_TOKENS}
    result = run_job(tmp_path_factory.mktemp("stock"), job, VLLM_PLUGINS="none")
    assert not result["plugin"]
    return result["tokens"]


def check(tokens: dict[str, list[int]], expected: list[list[int]]) -> dict:
    differing = [i for i, wanted in enumerate(expected) if tokens[str(i)] != wanted]
    assert differing == []
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert stats["committed_tokens"] > 0
    assert stats["fallbacks"] == {}
    assert own_engine().violations == []
    return stats


def test_one_after_another(expected: list[list[int]]) -> None:
    llm = start(STAGED, **options())
    tokens = {}
    for index, prompt in enumerate(prompts()):
        tokens[str(index)] = drive(llm, [prompt], greedy(MAX_TOKENS)).tokens["0"]
    check(tokens, expected)


def test_together_with_arrivals_chunks_and_prefix_hits(expected: list[list[int]]) -> None:
    llm = start(STAGED, **options(max_num_batched_tokens=64, long_prefill_token_threshold=16))
    arrivals = [i // 2 * 3 for i in range(len(QUESTIONS))]
    check(drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=arrivals).tokens, expected)
    again = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert counted(llm, "vllm:prefix_cache_hits") > 0
    check(again.tokens, expected)


def test_preempted(expected: list[list[int]]) -> None:
    llm = start(STAGED, **options(num_gpu_blocks_override=576 // PAGE))
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert counted(llm, "vllm:num_preemptions") > 0
    check(story.tokens, expected)


def test_aborts_in_the_middle(expected: list[list[int]]) -> None:
    llm = start(STAGED, **options())
    arrivals = [i // 4 * 5 for i in range(len(QUESTIONS))]
    gone = {4: "1", 11: "6", 23: "13", 24: "2"}
    story = drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=arrivals, aborts=gone)
    left = [i for i in range(len(QUESTIONS)) if str(i) not in gone.values()]
    check({str(n): story.tokens[str(i)] for n, i in enumerate(left)}, [expected[i] for i in left])
    for name in gone.values():
        tokens = story.tokens.get(name, [])
        assert len(tokens) < MAX_TOKENS
        assert tokens == expected[int(name)][: len(tokens)]


def test_a_draft_model(expected: list[list[int]]) -> None:
    """SmolLM2 drafts for itself; greedy tokens do not depend on the drafter."""
    speculation = {"method": "draft_model", "model": options()["model"]}
    llm = start(STAGED, speculation=speculation | {"num_speculative_tokens": 3}, **options())
    arrivals = [i // 4 * 3 for i in range(len(QUESTIONS))]
    story = drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=arrivals)
    stats = check(story.tokens, expected)
    assert stats["committed_tokens"] > stats["rejected_tokens"]


def test_stop_strings_and_structured_output() -> None:
    """What ends a request or bends its tokens is vLLM's; the same with and without staging."""
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    params = [
        greedy(MAX_TOKENS, stop=["two", "dog"]),
        greedy(MAX_TOKENS, structured_outputs=StructuredOutputsParams(json=schema)),
        greedy(MAX_TOKENS, stop_token_ids=[28], ignore_eos=False),
        greedy(MAX_TOKENS, structured_outputs=StructuredOutputsParams(regex="(ab|ba){3,20}")),
    ]
    found = []
    for nwor in ({"enable_nwor": False}, STAGED):
        story = drive(start(nwor, speculation=NGRAM, **options()), prompts()[:4], params)
        found.append((story.tokens, story.finished))
    assert found[0] == found[1]
    assert own_stats()["staged_tokens"] > 0
    assert own_engine().violations == []


def test_compiled_models_stage_too(expected: list[list[int]]) -> None:
    """Without enforce_eager vLLM compiles the model; attention stays an opaque call."""
    llm = start(STAGED, **options(enforce_eager=False))
    story = drive(llm, prompts()[:4], greedy(16))
    assert [story.tokens[str(i)] for i in range(4)] == [tokens[:16] for tokens in expected[:4]]
    assert own_stats()["staged_tokens"] > 0
    assert own_engine().violations == []
