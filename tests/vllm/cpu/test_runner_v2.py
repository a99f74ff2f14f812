"""Model runner V2 itself, on the CPU: partial passes of the target in turns with an EAGLE3 head,
and with lookups.

vLLM's runner, scheduler, speculator and sampler are the real ones, with asynchronous scheduling;
their Triton kernels run in Triton's interpreter (`triton_cpu.py`), and drafting is recorded and
replayed as CUDA graphs are (`recorded_graph.py`). Output is plain vLLM's, token for token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nwor_specpv.config import Settings
from support.engines import STOCK, drive, greedy, start
from support.installed import PAGE
from support.runner_v2_jobs import MAX_TOKENS, WITHOUT_HEAD, check, job, run
from support.small_views import SMALL_VIEW, prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return drive(start(STOCK, speculation=None), prompts(), greedy(MAX_TOKENS)).tokens


def truth(expected: dict[str, list[int]]) -> list[list[int]]:
    return [prompt + expected[str(i)] for i, prompt in enumerate(prompts())]


KINDS = [
    pytest.param("head", marks=pytest.mark.serves("lossless with a head", "V2")),
    pytest.param("lookups", marks=pytest.mark.serves("lossless without a head", "V2")),
]
SPECULATORS = {"head": "PartialViewSpeculator", "lookups": "SelfSpeculator"}


def told(kind: str, expected: dict[str, list[int]]) -> dict[str, Any]:
    """What a job says of who guesses: a head that knows the texts, or lookups."""
    return {"truth": truth(expected)} if kind == "head" else {"speculation": WITHOUT_HEAD}


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_in_graphs(kind: str, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    (found,) = run(
        tmp_path,
        job(graphs=[6, 2, 1], arrivals=[0, 0, 0, 1, 2, 3], **told(kind, expected)),
    )
    check(found, speculator=SPECULATORS[kind])
    assert found["tokens"] == [expected]
    assert found["replays"] > 3 * found["proposals"]
    # Passes confirm more than a token each, and full steps most of what they drafted.
    assert found["tokens_per_pass"] > (1.5 if kind == "head" else 1.1)
    assert found["steps"][0] < 0.6 * MAX_TOKENS
    assert found["rows_left"] < 8


def test_without_asynchronous_scheduling(tmp_path: Path, expected: dict[str, list[int]]) -> None:
    """A short request alone, then a long one with it: what is verified is what was drafted."""
    count, plain = 10, {name: expected[name][:10] for name in ("0", "1")}
    (found,) = run(
        tmp_path,
        job(synchronous=True, truth=truth(expected)[:2], arrivals=[2, 0])
        | {"prompts": prompts()[:2], "params": {"max_tokens": count}},
    )
    check(found, asynchronous=False)
    assert found["tokens"] == [plain]
    assert {wanted for wanted, _ in found["lengths"]} == {3, 10}
    assert {verified for _, verified in found["lengths"]} >= {3, 10}
    assert all(verified <= wanted for wanted, verified in found["lengths"])


ARMS = [[0, 0], [10, 2], [0, 0], [0, 0], [3, 0], [10, 3], [10, 1], [3, 0]]


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [("head", True), ("head", False), ("lookups", True)]
)
def test_the_arm_changes_in_every_step(
    tmp_path: Path, expected: dict[str, list[int]], kind: str, asynchronous: bool
) -> None:
    """Plain steps, guesses and passes in turns, as requests come and go: tokens stay plain
    vLLM's, and what is verified is what was asked for."""
    more = told(kind, expected) | {"arrivals": [0, 0, 0, 1, 2, 5], "arms": ARMS}
    more |= {} if asynchronous else {"synchronous": True}
    (found,) = run(tmp_path, job({"specpv_draft_passes": 0}, **more))
    check(found, asynchronous=asynchronous, speculator=SPECULATORS[kind])
    assert found["tokens"] == [expected]
    assert {wanted for wanted, _ in found["lengths"]} == {0, 3, 10}
    assert {verified for _, verified in found["lengths"]} >= {0, 3, 10}
    assert all(verified <= wanted for wanted, verified in found["lengths"])
    assert (found["without_speculator"] > 0) == (kind == "lookups")  # a head reads every token
    assert kind == "head" or 1.0 <= found["foreseen"][0] <= 4.0
    counted = found["grown"]
    for kind in ("plain", "guess", "pass"):
        assert counted[f"specpv_{kind}_steps_total"] >= 2
    assert 0 < counted["specpv_confirmed_tokens_total"] <= counted["specpv_drafted_tokens_total"]


@pytest.mark.serves("drafts by measured speed", "V2")
def test_speed_decides(tmp_path: Path, expected: dict[str, list[int]]) -> None:
    """It starts with plain steps. Memory is taken before the first request."""
    head = told("head", expected)
    free, fixed = run(tmp_path, job({"specpv_draft_passes": 0}, **head), job(**head))
    for found in (free, fixed):
        assert found["tokens"] == [expected]
        assert found["start"]["failures"] == found["failures"] == {}, found["latest_failure"]
        assert found["violations"] == []
    assert free["start"]["tail"] == fixed["start"]["tail"] > 0
    assert free["grown"]["specpv_plain_steps_total"] >= 6
    assert free["grown"]["specpv_plain_step_seconds_total"] > 0
    assert "specpv_plain_step_seconds_total" not in fixed["grown"]
    check(fixed)


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_shorter_than_a_view_have_guesses_alone(
    kind: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """Views of our own size, which no request of this model can outgrow, take no memory."""
    own = Settings()
    views = {name: getattr(own, name) for name in SMALL_VIEW if name.startswith("specpv_n_")}
    arms = {"arms": [[3, 0], [0, 0], [3, 0], [3, 0]]}
    (found,) = run(
        tmp_path, job(views | {"specpv_draft_passes": 0}, **arms, **told(kind, expected))
    )
    assert found["tokens"] == [expected]
    assert found["speculator"] == SPECULATORS[kind]
    assert found["start"] == {"tail": None, "failures": {}}
    assert found["violations"] == []
    assert found["failures"] == found["fallbacks"] == {}
    assert found["proposals"] == 0
    assert {verified for _, verified in found["lengths"]} >= {0, 3}
    assert found["steps"][0] < MAX_TOKENS + 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_happens_to_requests(
    kind: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """Preempted, aborted, and again from the prefix cache; a head that is always wrong."""
    tight = {"num_gpu_blocks_override": 800 // PAGE, "max_model_len": 320}
    preempted, aborted, again = run(
        tmp_path,
        job(start=tight, speculation={} if kind == "head" else WITHOUT_HEAD),
        job(
            {"specpv_max_requests": 2, "specpv_draft_passes": 2},
            aborts={4: "0"},
            **told(kind, expected),
        ),
        job({"specpv_draft_passes": 0}, repeats=2, graphs=[8, 1], **told(kind, expected)),
    )
    check(preempted, speculator=SPECULATORS[kind])
    assert preempted["tokens"] == [expected]
    assert preempted["preemptions"] > 0
    check(aborted, speculator=SPECULATORS[kind])
    cut = aborted["tokens"][0].pop("0")
    assert cut == expected["0"][: len(cut)]
    assert len(cut) < MAX_TOKENS
    assert aborted["tokens"] == [{name: t for name, t in expected.items() if name != "0"}]
    assert again["tokens"] == [expected, expected]
    assert again["prefix_hits"] > 0
    assert again["violations"] == []
    assert again["cache_written_by_proposals"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_failing_passes_leave_the_guesses_alone(
    kind: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    method = {} if kind == "head" else WITHOUT_HEAD
    greedy_run, sampled = run(
        tmp_path,
        job(fault=5, speculation=method),
        job(
            fault=5,
            speculation=method | {"draft_sample_method": "probabilistic"},
            params={"max_tokens": 8, "temperature": 0.7, "seed": 5},
        ),
    )
    for found in (greedy_run, sampled):
        assert found["failures"] == {"error": 1}
        assert found["violations"] == []
        assert found["cache_written_by_proposals"] == 0
    assert greedy_run["tokens"] == [expected]
    assert all(len(tokens) == 8 for tokens in sampled["tokens"][0].values())


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_at_temperatures_are_drawn_from_their_logits(
    kind: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """Every draft is the one its logits and the noise of its place give: what vLLM's sampler is
    told is what was drawn from. Requests at temperature 0 in the same set-up stay greedy."""
    # vLLM's kernel for top-k and top-p does not run in Triton's interpreter.
    params = {"max_tokens": 12, "temperature": 0.8, "seed": 3}
    method = {} if kind == "head" else WITHOUT_HEAD
    drawn, plain = run(
        tmp_path,
        job(params=params, graphs=[6, 1], speculation=method),
        job(**told(kind, expected)),
    )
    check(drawn, speculator=SPECULATORS[kind])
    assert drawn["replays"] > 3 * drawn["proposals"]
    number, right = drawn["drawn"]
    assert number == right > 60
    check(plain, speculator=SPECULATORS[kind])
    assert plain["tokens"] == [expected]


def test_nothing_provisional_is_summarised_or_hashed(tmp_path: Path) -> None:
    """A head that is always wrong. After every proposal, and in every layer: summaries are those of
    the keys in the cache, of tokens that full steps have confirmed. What is published for other
    requests are hashes of such tokens, too."""
    count = 56
    # Steps that were under way when a request ended go on beyond its text.
    longer = drive(start(STOCK, speculation=None), prompts(), greedy(count + 24)).tokens
    (found,) = run(
        tmp_path,
        job(
            {"specpv_n_window_blocks": 1},  # so that what was generated leaves it soon
            confirmed=truth(longer),
            graphs=[6, 2, 1],
            arrivals=[0, 0, 0, 1, 2, 5],
            params={"max_tokens": count},
        ),
    )
    check(found)
    assert found["tokens"] == [{name: tokens[:count] for name, tokens in longer.items()}]
    seen = found["confirmed"]
    print(seen)
    assert seen["problems"] == []
    assert seen["looks"] > 20
    assert seen["after_rejections"] > 5
    assert seen["blocks"] > 5 * seen["looks"]
    assert seen["generated"] > 0  # blocks that hold tokens of steps with rejections
    assert seen["published"] > 320 // PAGE
    assert seen["published_early"] == 0
    assert seen["hashes"] > seen["hashes_of_prompts"]
    assert seen["hashes_of_other_tokens"] == 0


def test_the_reference_samples_as_vllms_kernels(tmp_path: Path) -> None:
    (found,) = run(tmp_path, {"kernels": 48})
    lengths = found.pop("lengths")
    assert found == {"drawn": 1.0, "logits": True, "verified": 1.0}
    # Rows whose first draft is rejected, whose drafts are all accepted, and some between.
    assert {1, 5} < set(lengths)
