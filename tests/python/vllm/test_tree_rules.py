"""What draft trees refuse, and what they set where the user has said nothing: without vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nwor_specpv import NworError
from nwor_specpv.config import Settings
from nwor_specpv.vllm import defaults
from nwor_specpv.vllm.hooks.trees import walks_rows
from nwor_specpv.vllm.tree import rules
from nwor_specpv.vllm.tree.shape import ARM_ROWS, arms_of_batch, rows_of_step

FINE = rules.TreeSetup(drafter="eagle3", num_drafts=15, max_requests=8, max_tokens=2048)
TREE = Settings(draft_tree=16)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_ordinary_set_up_is_let_in(method: str) -> None:
    assert rules.refusals(TREE, replace(FINE, drafter=method), None) == []
    rules.judge(TREE, FINE, None)


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"runner_v2": False}, "model runner V1", "VLLM_USE_V2_MODEL_RUNNER=1"),
        ({"tensor_parallel": 2}, "tensor parallelism of 2", "--tensor-parallel-size 1"),
        ({"pipeline_parallel": 2}, "pipeline parallelism of 2", "--pipeline-parallel-size 1"),
        ({"data_parallel": 4}, "data parallelism of 4", "--data-parallel-size 1"),
        ({"multimodal": True}, "images or M-RoPE", "without draft_tree"),
        ({"hybrid": True}, "state-space layers", "without draft_tree"),
        ({"mla": True}, "MLA", "without draft_tree"),
        ({"lora": True}, "LoRA", "--enable-lora"),
        ({"sampling_mask": True}, "sampling masks", "--return-sampling-mask"),
        ({"kv_connector": True}, "KV connectors", "--kv-transfer-config"),
        ({"drafter": "ngram", "num_drafts": 15}, "method ngram has no head", "eagle or eagle3"),
        ({"num_drafts": 4}, "num_speculative_tokens is 4", "drop num_speculative_tokens"),
        ({"drafts_by_requests": ((1, 8, 4),)}, "lengths of chains", "drop it"),
        ({"draft_sampling": "probabilistic"}, "draws one chain", "keep vLLM's distribution"),
        ({"acceptance": "synthetic"}, "'synthetic' is one of chains", "drop it"),
        ({"draft_bytes": 1 << 30}, "take 137438953472 bytes", "raise max_staging_bytes"),
        ({"logit_bytes": 1 << 28}, "logits of 128 rows take", "lower draft_tree"),
        ({"max_tokens": 127}, "128 rows of 8 requests do not fit", "--max-num-batched-tokens"),
    ],
)
def test_each_refusal_names_reason_and_remedy(change: dict, reason: str, remedy: str) -> None:
    (refusal,) = rules.refusals(TREE, replace(FINE, **change), None)
    assert reason in refusal.reason
    assert remedy in refusal.remedy
    with pytest.raises(NworError, match="nwor_specpv, draft_tree: "):
        rules.judge(TREE, replace(FINE, **change), None)


def test_what_settings_and_staging_refuse() -> None:
    (refusal,) = rules.refusals(Settings(draft_tree=16, enable_specpv=True), FINE, None)
    assert "enable_specpv" in refusal.reason
    nothing = rules.TreeSetup(max_tokens=2048)
    (refusal,) = rules.refusals(TREE, nothing, "no speculation is configured")
    assert "no speculation is configured" in refusal.reason


AUTO = Settings(draft_tree="auto")
CHOSEN = replace(
    FINE, num_drafts=63, drafts_by_requests=((1, 1, 63),), chooses_rows=True, max_requests=40
)


def test_rows_chosen_by_speed() -> None:
    assert rules.refusals(AUTO, CHOSEN, None) == []
    (refusal,) = rules.refusals(AUTO, replace(CHOSEN, chooses_rows=False), None)
    assert "chooses no rows" in refusal.reason
    assert "drop --scheduler-cls, or set draft_tree to a number of rows" in refusal.remedy
    (refusal,) = rules.refusals(AUTO, replace(CHOSEN, drafts_by_requests=((1, 9, 3),)), None)
    assert "lengths of chains" in refusal.reason
    (refusal,) = rules.refusals(AUTO, replace(CHOSEN, num_drafts=4), None)
    assert "trees have up to 63 drafts" in refusal.reason
    # A request must have room for the smallest trees; larger ones are left out where they do not
    # fit.
    (refusal,) = rules.refusals(AUTO, replace(CHOSEN, max_tokens=3), None)
    assert "4 rows of 1 requests do not fit" in refusal.reason


def test_room_of_a_step() -> None:
    assert rules.room_of_step(AUTO, CHOSEN) == 2048
    assert rules.room_of_step(AUTO, replace(CHOSEN, logit_bytes=1 << 22)) == 512
    staging = Settings(draft_tree="auto", max_staging_bytes=1 << 20)
    assert rules.room_of_step(staging, replace(CHOSEN, draft_bytes=1 << 14)) == 64


def test_rows_of_a_batch() -> None:
    assert arms_of_batch(1, 2048) == list(ARM_ROWS) == [4, 8, 16, 32, 64]
    assert arms_of_batch(9, 2048) == [4, 8, 16, 32]
    assert arms_of_batch(200, 2048) == [4]  # MOST_ROWS is for larger trees
    assert arms_of_batch(600, 2048) == []
    assert arms_of_batch(5, 64) == [4, 8]
    for room in (3, 4, 63, 100, 511, 512, 700, 2048):
        for requests in (1, 2, 7, 8, 9, 60, 128, 129, 300):
            every = [n * rows for n in range(1, requests + 1) for rows in arms_of_batch(n, room)]
            assert rows_of_step(requests, room) == max(every, default=0), (room, requests)


def test_a_layer_with_a_window_is_refused() -> None:
    layers = {"a": SimpleNamespace(), "b": SimpleNamespace(sliding_window=None)}
    rules.judge_layers(layers)
    layers["c"] = SimpleNamespace(sliding_window=128)
    with pytest.raises(NworError, match="c has a sliding window of 128"):
        rules.judge_layers(layers)


@pytest.mark.parametrize(
    ("tree", "said", "added"),
    [
        ("off", {"method": "eagle3"}, {}),
        (16, {}, {}),
        (16, {"method": "ngram"}, {}),
        (16, {"method": "eagle3"}, {"num_speculative_tokens": 15}),
        (2, {"method": "eagle"}, {"num_speculative_tokens": 1}),
        (16, {"method": "eagle3", "num_speculative_tokens": 4}, {}),
        (
            "auto",
            {"method": "eagle3", "num_speculative_tokens": 4},
            {"num_speculative_tokens_per_batch_size": [(1, 1, 63)]},
        ),
    ],
)
def test_drafts_follow_from_the_rows(tree: int | str, said: dict, added: dict) -> None:
    assert defaults.tree_speculation(tree, said) == added


def test_whose_rows_vllm_walks_as_a_chain() -> None:
    plain = {
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "bad_words_token_ids": None,
        "structured_outputs": None,
        "thinking_token_budget": None,
    }
    assert not walks_rows(None)
    assert not walks_rows(SimpleNamespace(**plain))
    for change in (
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.5},
        {"presence_penalty": 0.5},
        {"bad_words_token_ids": [[4, 5]]},
        {"structured_outputs": SimpleNamespace(json="{}")},
        {"thinking_token_budget": 100},
    ):
        assert walks_rows(SimpleNamespace(**(plain | change)))
