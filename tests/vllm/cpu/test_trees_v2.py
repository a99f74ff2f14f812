"""Draft trees on model runner V2: what is written is plain vLLM's, token for token.

Runner and scheduler are vLLM's own; `triton_cpu.py` says how they run on a CPU. Plain vLLM runs on
the same model runner, without speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.engine_process import run_script
from support.engines import STAGED, story_prompts
from support.installed import PAGE

pytestmark = pytest.mark.serves("draft trees", "V2")

SCRIPT = Path(__file__).parents[1] / "support" / "processes" / "trees_v2.py"
ROWS, TOKENS = 8, 10
PROMPTS = [[*text, i + 5] for i, text in enumerate(story_prompts(7))]
SAMPLED = {"temperature": 0.9, "seed": 11}
# What requests of one batch ask for. From the fifth on vLLM takes their rows for chains.
ASKED: list[dict[str, Any]] = [
    {"logprobs": 2},
    SAMPLED | {"logprobs": 1},
    SAMPLED | {"top_k": 20, "top_p": 0.9, "seed": 12},
    SAMPLED | {"min_p": 0.05, "logit_bias": {265: 2.0, 410: -3.0}, "min_tokens": 4, "seed": 13},
    SAMPLED | {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1},
    {"presence_penalty": 0.7},
    {"bad_words": [[410], [292, 411]]},
]
# A request of each kind: greedy, sampled, sampled as a chain, greedy as a chain.
FEW = [0, 1, 4, 6]


def job(which: Sequence[int] = range(len(PROMPTS)), **more: Any) -> dict[str, Any]:
    nwor = STAGED | {"draft_tree": ROWS} | more.pop("nwor", {})
    options = {"nwor": nwor, "speculation": {}} | more.pop("start", {})
    params = [{"max_tokens": TOKENS} | ASKED[i] for i in which]
    return {"start": options, "prompts": [PROMPTS[i] for i in which], "params": params} | more


def plain(which: Sequence[int] = range(len(PROMPTS)), **more: Any) -> dict[str, Any]:
    return job(which, start={"nwor": {}, "speculation": None}, **more)


def run(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    found, log = run_script(folder, list(jobs), SCRIPT)
    print(log[-2000:])
    return found


def check(found: dict[str, Any], *, fallbacks: dict[str, int] | None = None) -> None:
    assert found["speculator"] == "TreeSpeculator"
    assert found["sampler"] == "TreeSampler"
    assert found["async"] is True
    assert found["violations"] == []
    stats = found["stats"]
    assert set(stats["fallbacks"]) == set(fallbacks or {})
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]


def check_log_probs(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, places in expected["log_probs"][0].items():
        mine = found["log_probs"][0][name]
        assert len(mine) == len(places) == TOKENS
        for one, other in zip(mine, places, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.quick
def test_mixed_requests_over_random_trees(tmp_path: Path) -> None:
    """Trees that often hold what is to come on one of their paths."""
    expected, found = run(tmp_path, plain(), job(oracle=0, seed=1, arrivals=[0, 0, 0, 0, 1, 2, 3]))
    check(found)
    assert found["tokens"] == expected["tokens"]
    check_log_probs(found, expected)
    # Branches are taken, and several rows deep.
    taken = [path for step in found["walks"] for path in step]
    assert any(path and path != list(range(1, len(path) + 1)) for path in taken)
    assert sum(map(len, taken)) > 0.4 * len(PROMPTS) * TOKENS
    assert found["steps"][0] < expected["steps"][0]


@pytest.mark.quick
@pytest.mark.parametrize("case", ["own vocabulary", "the target's matrix", "two ranks", "no ids"])
def test_the_heads_best_tokens_are_vllms(case: str) -> None:
    """Those of vLLM's logits, which spread a head's own over the target's vocabulary."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    from nwor_specpv.vllm.tree.speculator import TreeSpeculator

    random = torch.Generator().manual_seed(3)
    whole = case in ("the target's matrix", "no ids")
    words, size = 40, 8
    own = words if whole else 12
    ids = torch.randperm(words, generator=random)[:12].sort().values - torch.arange(12)
    asked = []

    class Head:
        """vLLM's own logits, of the parts that they are made of."""

        config = SimpleNamespace(vocab_size=words, draft_vocab_size=12)
        draft_id_to_target_id = None if case == "no ids" else ids
        lm_head = torch.randn(own, size, generator=random)

        def logits_processor(self, matrix: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return hidden @ matrix.T

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            asked.append(len(hidden))
            if case == "the target's matrix":  # a head whose logits are for all tokens
                return hidden @ self.lm_head.T
            return Eagle3LlamaForCausalLM.compute_logits(self, hidden)

    ranks = SimpleNamespace(tensor_parallel_size=2 if case == "two ranks" else 1)
    speculator = TreeSpeculator.__new__(TreeSpeculator)
    speculator.model = Head()
    speculator.vllm_config = SimpleNamespace(parallel_config=ranks)
    outputs = torch.randn(5, 3, size, generator=random)
    tokens, log_probs = speculator._best(outputs, 4)
    assert len(asked) == (0 if case == "own vocabulary" else 1)
    logits = speculator.model.compute_logits(outputs.flatten(0, 1)).unflatten(0, (5, 3))
    expected = logits.float().log_softmax(-1).topk(4, dim=-1)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(log_probs, expected.values)
    # Graphs begin with what `sample_draft` has left.
    speculator._trees = SimpleNamespace(shape=SimpleNamespace(width=4))
    speculator._first_tokens = torch.zeros(9, 4, dtype=torch.int64)
    speculator._first_scores = torch.zeros(9, 4)
    assert torch.equal(speculator.sample_draft(outputs[:, 1]), expected.indices[:, 1, 0])
    assert torch.equal(speculator._first_tokens[:5], expected.indices[:, 1])
    torch.testing.assert_close(speculator._first_scores[:5], expected.values[:, 1])


# Drafts that steps have in turns where they are chosen: 0 are a plain step.
TURNS = (7, 3, 0, 15, 63, 0, 0, 31)


@pytest.mark.slow
def test_trees_that_a_head_grows(tmp_path: Path) -> None:
    """Steps differ in their rows, and growing is recorded and replayed."""
    expected, found = run(
        tmp_path,
        plain(FEW),
        job(
            FEW,
            nwor={"draft_tree": "auto"},
            arms=[[drafts, 0] for drafts in TURNS],
            arrivals=[0, 4, 4, 5],
            graphs=[[64, 1], [32, 4], [16, 4], [8, 4], [4, 4]],
        ),
    )
    check(found)
    assert found["tokens"] == expected["tokens"]
    check_log_probs(found, expected)
    assert found["scheduler"] == "TreeScheduler"
    assert found["replays"] > 0.6 * len(found["walks"])  # not of all batches
    wanted, verified = (set(part) for part in zip(*found["lengths"], strict=True))
    assert wanted == set(TURNS)
    assert verified >= {0, 3, 7, 15, 31}
    counted = found["grown"]
    assert counted["specpv_plain_steps_total"] > 2
    assert counted["specpv_guess_steps_total"] > 4


@pytest.mark.slow
def test_rows_by_speed_and_an_eagle_head(tmp_path: Path) -> None:
    """What the scheduler chooses by itself, and trees of a head that reads one layer's states."""
    expected, chosen, eagle = run(
        tmp_path,
        plain(FEW),
        job(FEW, nwor={"draft_tree": "auto"}),
        job(FEW, head="eagle"),
    )
    for found in (chosen, eagle):
        check(found)
        assert found["tokens"] == expected["tokens"]
        check_log_probs(found, expected)
    assert chosen["lengths"][0] == [0, 0]  # nothing was measured
    assert chosen["grown"]["specpv_plain_steps_total"] > 0
    assert "specpv_plain_steps_total" not in eagle["grown"]
    assert {wanted for wanted, _ in eagle["lengths"]} == {ROWS - 1}


@pytest.mark.slow
def test_what_happens_to_requests(tmp_path: Path) -> None:
    """Preempted, aborted, again from the prefix cache, at the end of the context, and where staging
    has no room: then no draft is accepted."""
    tight = {"num_gpu_blocks_override": 160 // PAGE, "max_model_len": 128}
    # A head computes the last block of a hit again.
    long = {"prompts": [(PROMPTS[i] * 40)[: 3 * PAGE + 5] for i in FEW]}
    expected, expected_long, preempted, aborted, again, cut, direct = run(
        tmp_path,
        plain(FEW),
        plain(FEW, **long),
        job(FEW, oracle=0, start=tight),
        job(FEW, oracle=0, seed=2, aborts={3: "0"}),
        job(FEW, oracle=1, seed=3, repeats=2, start={"enable_prefix_caching": True}, **long),
        job(FEW, oracle=0, seed=4, start={"max_model_len": 28}),
        job(FEW, oracle=0, seed=5, bypass=True, nwor={"strict": False}),
    )
    check(preempted)
    assert preempted["tokens"] == expected["tokens"]
    assert preempted["preemptions"] > 0
    check(aborted)
    whole = expected["tokens"][0]
    ended = aborted["tokens"][0].pop("0")
    assert ended == whole["0"][: len(ended)]
    assert aborted["tokens"] == [{name: t for name, t in whole.items() if name != "0"}]
    check(again)
    assert again["tokens"] == 2 * expected_long["tokens"]
    assert set(again["cached"][1].values()) == {2 * PAGE}
    check(cut)
    for number, name in zip(FEW, whole, strict=True):
        length = min(TOKENS, 28 - len(PROMPTS[number]))
        assert cut["tokens"][0][name] == whole[name][:length]
    assert min(map(len, cut["tokens"][0].values())) < TOKENS
    check(direct, fallbacks={"capacity": 1})
    assert direct["tokens"] == expected["tokens"]
    assert not any(path for step in direct["walks"] for path in step)
    assert direct["stats"]["committed_tokens"] == 0
