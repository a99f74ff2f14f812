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
from nwor_specpv.vllm.tree.shape import rows_of_step

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
        ({"readable": False}, "were not read for vLLM", "install vLLM 0.26.0"),
        ({"tensor_parallel": 2}, "tensor parallelism of 2", "--tensor-parallel-size 1"),
        ({"pipeline_parallel": 2}, "pipeline parallelism of 2", "--pipeline-parallel-size 1"),
        ({"data_parallel": 4}, "data parallelism of 4", "--data-parallel-size 1"),
        ({"multimodal": True}, "images or M-RoPE", "without draft_tree"),
        ({"hybrid": True}, "state-space layers", "without draft_tree"),
        ({"mla": True}, "MLA", "without draft_tree"),
        ({"lora": True}, "LoRA", "--enable-lora"),
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


def test_rows_chosen_by_the_number_of_requests() -> None:
    auto, ranges = Settings(draft_tree="auto"), rules._chosen_drafts()
    assert ranges == ((1, 1, 63), (2, 4, 31), (5, 8, 15), (9, 16, 7), (17, 17, 3))
    fine = replace(FINE, num_drafts=63, drafts_by_requests=ranges, logit_bytes=4, max_requests=40)
    assert rules.refusals(auto, fine, None) == []
    (refusal,) = rules.refusals(auto, replace(fine, experts=True), None)
    assert "set draft_tree to a number of rows" in refusal.remedy
    (refusal,) = rules.refusals(auto, replace(fine, drafts_by_requests=((1, 9, 3),)), None)
    assert "lengths of chains" in refusal.reason
    (refusal,) = rules.refusals(auto, replace(fine, num_drafts=4), None)
    assert "trees have up to 63 drafts" in refusal.reason
    assert [rows_of_step(n) for n in (1, 2, 4, 7, 16, 17, 32, 33)] == [
        *(64, 64, 128, 128, 128, 128, 128, 132)
    ]


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
            {"num_speculative_tokens_per_batch_size": list(rules._chosen_drafts())},
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
    }
    assert not walks_rows(None)
    assert not walks_rows(SimpleNamespace(**plain))
    for change in (
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.5},
        {"presence_penalty": 0.5},
        {"bad_words_token_ids": [[4, 5]]},
        {"structured_outputs": SimpleNamespace(json="{}")},
    ):
        assert walks_rows(SimpleNamespace(**(plain | change)))
