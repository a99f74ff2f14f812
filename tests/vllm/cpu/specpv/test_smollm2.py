"""SmolLM2-135M, float32, long prompts: drafts over views, and the tokens of plain vLLM.

Prompts are chapters of a book, a question about the beginning at the very end, and code. Views are
small, so most of the context is left out of them, but for one of the default size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nwor_specpv import Metrics
from nwor_specpv.models import smollm2
from nwor_specpv.vllm.specpv.rules import DRAFTER
from support import disturbances
from support.engines import check_drafting, drive, greedy, own_engine, release_engines, start
from support.engines import stats as own_stats

pytestmark = [pytest.mark.serves("lossless without a head", "V1"), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[4]
MAX_TOKENS = 48
SPECULATION = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 16}
VIEW = {
    "enable_specpv": True,
    "specpv_n_sink_blocks": 2,
    "specpv_n_retrieval_blocks": 16,
    "specpv_n_window_blocks": 6,
    "specpv_draft_passes": 6,
    "check_contract": True,
    "strict": True,
}


def text(*names: str) -> str:
    return "\n\n".join((ROOT / name).read_text() for name in names)


def prompts() -> list[str]:
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    book = text("python/nwor_specpv/cli/demo/war_and_peace.txt")
    return [
        turn.format(f"{book[:4500]}\n\nContinue this text."),
        turn.format(
            f"The password is 'heliotrope'. Remember it.\n\n{book[3000:7000]}\n\n"
            "What is the password that was named in the first line?"
        ),
        text("python/nwor_specpv/ops/tree.py")[:4000],
        turn.format("What is the capital of France?"),
    ]


def options(**more: Any) -> dict[str, Any]:
    return {
        "model": str(smollm2("float32")),
        "max_model_len": 3072,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 288 << 20,
    } | more


def grown(before: dict[str, Any]) -> tuple[int, int]:
    """Tokens drafted over views, and confirmed, since the snapshot `before`."""
    now = Metrics().snapshot()
    names = (f"specpv_{kind}_tokens_total" for kind in ("drafted", "confirmed"))
    drafted, confirmed = (now[name] - before[name] for name in names)
    return drafted, confirmed


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = start({"enable_nwor": False}, speculation=None, **options())
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    return [story.tokens[str(i)] for i in range(4)]


@pytest.mark.parametrize(
    "nwor",
    [
        {},
        {"specpv_draft_passes": 0, "specpv_selection": "shared"},
        {"specpv_selector": "quest", "specpv_draft_lookup": 0, "specpv_draft_passes": 16},
        {"specpv_selector": "streaming"},
    ],
    ids=["views", "by cost, shared lists", "quest, no lookups", "sinks and window"],
)
def test_long_prompts_give_plain_vllms_tokens(expected: list, nwor: dict) -> None:
    before = Metrics().snapshot()
    llm = start(VIEW | nwor, speculation=SPECULATION, **options())
    story = drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=[0, 0, 2, 2])
    assert [story.tokens[str(i)] for i in range(4)] == expected
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)
    if nwor.get("specpv_draft_passes", 1):
        drafted, confirmed = grown(before)
        print(f"{confirmed} of {drafted} drafts confirmed, {story.steps} steps")
        # Without retrieval the text in the middle is out of sight.
        share = 0.15 if nwor.get("specpv_selector") == "streaming" else 0.3
        assert confirmed > share * drafted > 0


def test_a_view_of_the_default_size() -> None:
    """One prompt longer than a view of 4256 tokens."""
    book = text("python/nwor_specpv/cli/demo/war_and_peace.txt")
    sizes = options(max_model_len=6144)
    llm = start({"enable_nwor": False}, speculation=None, **sizes)
    expected = drive(llm, [book[:24_000]], greedy(32)).tokens
    del llm
    release_engines()
    before = Metrics().snapshot()
    chosen = ("enable_specpv", "specpv_draft_passes", "check_contract", "strict")
    llm = start({key: VIEW[key] for key in chosen}, speculation=SPECULATION, **sizes)
    story = drive(llm, [book[:24_000]], greedy(32))
    assert own_engine().runner.drafter._store.budget.static_tokens == 4256
    assert story.tokens == expected
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)
    drafted, confirmed = grown(before)
    print(f"{confirmed} of {drafted} drafts confirmed, {story.steps} steps")
    assert confirmed > 0.3 * drafted > 0


def test_what_happens_to_requests() -> None:
    """Alone and all at once, preempted, found in the prefix cache, aborted, stopped; one engine."""
    from transformers import AutoTokenizer

    script = disturbances.passages(AutoTokenizer.from_pretrained(str(smollm2("float32"))))
    llm = start({"enable_nwor": False}, speculation=None, **options())
    expected = drive(llm, script.prompts, greedy(MAX_TOKENS)).tokens
    del llm
    release_engines()
    before = Metrics().snapshot()
    nwor = VIEW | {"specpv_max_requests": script.num_views, "specpv_draft_passes": 3}
    speculation = SPECULATION | {"num_speculative_tokens": 8}
    llm = start(nwor, speculation=speculation, **options(**script.options))
    found = script.run(llm)
    assert len(found.outputs) > 3 * len(script.prompts)
    for i, output in found.outputs:
        assert list(output.token_ids) == expected[str(i)][: len(output.token_ids)]
    print(f"{found.preemptions} preemptions, {found.cached} cached, {found.stops} stops")
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)


def test_compiled_models_draft_too(expected: list) -> None:
    llm = start(VIEW, speculation=SPECULATION, **options(enforce_eager=False))
    story = drive(llm, prompts()[2:], greedy(24))
    assert [story.tokens[str(i)] for i in range(2)] == [tokens[:24] for tokens in expected[2:]]
