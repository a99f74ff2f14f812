"""What is refused, which versions and signatures are let in, what settings say: without vLLM."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nwor_specpv import NworError, verify_attention
from nwor_specpv.vllm import support, versions
from nwor_specpv.vllm.settings import read_settings

FINE = support.Setup(speculation="ngram", num_speculative_tokens=4)


def test_an_ordinary_set_up_is_let_in() -> None:
    assert support.refusals(FINE) == []


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"pipeline_parallel": 2}, "pipeline parallelism of 2", "--pipeline-parallel-size 1"),
        ({"decode_context_parallel": 2}, "context parallelism", "--decode-context-parallel-size 1"),
        ({"prefill_context_parallel": 2}, "context parallelism", "--prefill-context-parallel-size"),
        ({"micro_batches": True}, "dual batch overlap", "--enable-dbo and --ubatch-size"),
        ({"kv_connector": "Nixl"}, "KV connector Nixl", "--kv-transfer-config"),
        ({"mla": True}, "MLA", "without nwor_specpv"),
        ({"cascade_attention": True}, "cascade attention", "--disable-cascade-attn"),
        ({"kv_sharing_fast_prefill": True}, "fast prefill", "--kv-sharing-fast-prefill"),
        ({"writes_in_pieces": True}, "piecewise CUDA graphs", "cudagraph_mode FULL_DECODE_ONLY"),
        (
            {"sharing_layers": 2},
            "2 layers attend to the K/V of other layers",
            "without nwor_specpv",
        ),
        ({"drafter_shares_kv": True}, "this drafter attends to the K/V", "another drafter"),
        ({"attention_chunk": 32}, "attention in chunks of 32 tokens", "without nwor_specpv"),
        ({"bidirectional_images": True}, "within images", "without nwor_specpv"),
        ({"answer_window": 128}, "answers see only the latest 128", "without nwor_specpv"),
        ({"encoder": True}, "encoder-decoder models", "without nwor_specpv"),
    ],
)
def test_each_refusal_names_reason_and_remedy(change: dict, reason: str, remedy: str) -> None:
    (refusal,) = support.refusals(replace(FINE, **change))
    assert reason in refusal.reason
    assert remedy in refusal.remedy
    assert str(refusal) == f"{refusal.reason}; {refusal.remedy}"


@pytest.mark.parametrize("version", [adapter.version for adapter in versions.ADAPTERS])
def test_connectors_that_were_tried_are_let_in(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.26 saves, of answers, the place of a token that was never computed."""
    known = {adapter.version: adapter for adapter in versions.ADAPTERS}
    monkeypatch.setattr(versions, "adapter", known[version])
    for name in sorted(support.CONNECTORS):
        assert support.refusals(replace(FINE, kv_connector=name)) == []
    whole = replace(FINE, kv_connector=support.OFFLOADING, offloads_answers=True)
    found = [refusal.remedy for refusal in support.refusals(whole)]
    assert [("offload_prompt_only" in text) for text in found] == [True] * (version == "0.26.0")


@pytest.mark.parametrize(
    ("transfer", "name"),
    [
        (None, None),
        ({"kv_connector": None}, None),
        ({"kv_connector": "OffloadingConnector"}, "OffloadingConnector"),
        ({"kv_connector": "OffloadingConnector", "module": "mine"}, "mine.OffloadingConnector"),
    ],
)
def test_a_connector_of_another_module_is_not_vllms(transfer: dict | None, name: str) -> None:
    given = transfer and SimpleNamespace(
        kv_connector=transfer["kv_connector"], kv_connector_module_path=transfer.get("module")
    )
    assert support._connector(given) == name


def test_every_problem_is_told_at_once() -> None:
    found = support.refusals(replace(FINE, pipeline_parallel=4, mla=True, kv_connector="x"))
    assert len(found) == 3


def compilation(mode: str = "NONE", *, pieces: bool = False, split: bool = True) -> SimpleNamespace:
    """Graphs of a mode; of pieces that end at attention, and before each write if `split`."""
    return SimpleNamespace(
        cudagraph_mode=SimpleNamespace(name=mode),
        is_attention_compiled_piecewise=lambda: pieces,
        splitting_ops_contain_kv_cache_update=lambda: split,
    )


def model_config(**more: object) -> SimpleNamespace:
    plain = {"use_mla": False, "disable_cascade_attn": True, "attention_chunk_size": None}
    plain |= {"is_mm_prefix_lm": False, "rswa_window": None, "is_encoder_decoder": False}
    return SimpleNamespace(**(plain | {"hf_text_config": SimpleNamespace()} | more))


def vllm_config(by_batch_size: object = None, **speculation: object) -> SimpleNamespace:
    if speculation:
        speculation = {"use_gemma4_mtp": lambda: False} | speculation
        speculation |= {"num_speculative_tokens_per_batch_size": by_batch_size}
    return SimpleNamespace(
        compilation_config=compilation(),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=2,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        model_config=model_config(),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        kv_transfer_config=None,
        speculative_config=SimpleNamespace(**speculation) if speculation else None,
    )


def test_a_configuration_is_described_in_plain_values() -> None:
    found = support.describe(vllm_config(method="eagle3", num_speculative_tokens=5))
    assert found == support.Setup(
        pipeline_parallel=2, speculation="eagle3", num_speculative_tokens=5
    )
    assert support.describe(vllm_config()).speculation is None
    assert support.describe(vllm_config(method="x", num_speculative_tokens=None)) == support.Setup(
        pipeline_parallel=2, speculation="x"
    )
    ranges = [(1, 8, 4), (9, 32, 2), (33, 40, 4), (41, 64, 0)]
    chosen = support.describe(vllm_config(ranges, method="x", num_speculative_tokens=4))
    assert chosen.drafts_by_batch_size == (0, 2, 4)


@pytest.mark.parametrize(
    ("of_model", "described"),
    [
        ({"hf_text_config": SimpleNamespace(num_kv_shared_layers=15)}, {"sharing_layers": 15}),
        ({"hf_text_config": SimpleNamespace(num_kv_shared_layers=0)}, {}),
        ({"attention_chunk_size": 8192}, {"attention_chunk": 8192}),
        ({"is_mm_prefix_lm": True}, {"bidirectional_images": True}),
        ({"rswa_window": 128}, {"answer_window": 128}),
        ({"is_encoder_decoder": True}, {"encoder": True}),
    ],
)
def test_what_a_model_attends_to_is_described(of_model: dict, described: dict) -> None:
    config = vllm_config(method="ngram", num_speculative_tokens=4)
    config.model_config = model_config(**of_model)
    assert support.describe(config) == replace(FINE, pipeline_parallel=2, **described)


def test_a_drafter_that_shares_the_targets_kv_is_noticed() -> None:
    config = vllm_config(method="mtp", num_speculative_tokens=1, use_gemma4_mtp=lambda: True)
    assert support.describe(config).drafter_shares_kv


@pytest.mark.parametrize("breakable", ["0", "1"])
@pytest.mark.parametrize(
    ("graphs", "refused", "refused_if_breakable"),
    [
        (compilation(), False, False),
        (compilation("FULL_AND_PIECEWISE", pieces=True), False, True),
        (compilation("FULL_AND_PIECEWISE", pieces=True, split=False), True, True),
        (compilation("FULL", split=False), False, True),
        (compilation("FULL_DECODE_ONLY", pieces=True, split=False), False, False),
    ],
    ids=["none", "vLLM's default", "partitioned", "full", "decodes"],
)
def test_writes_in_pieces_are_noticed(
    graphs: SimpleNamespace,
    refused: bool,
    refused_if_breakable: bool,
    breakable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    config = vllm_config()
    config.compilation_config = graphs
    wanted = refused_if_breakable if breakable == "1" else refused
    assert support.describe(config).writes_in_pieces is wanted


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"attn_type": "encoder"}, "type encoder"),
        ({"alibi": True}, "ALiBi"),
        ({"sinks": True}, "sinks"),
        ({"kv_sharing_target": "layers.0"}, "no K/V of its own but that of layers.0"),
        ({"head_size": 12}, "head size of 12"),
        ({"head_size": 512}, "head size of 512"),
        ({"quantized_cache": True}, "quantised"),
    ],
)
def test_layers_we_cannot_serve(change: dict, problem: str | None) -> None:
    layer = {
        "attn_type": "decoder",
        "alibi": False,
        "sinks": False,
        "kv_sharing_target": None,
        "head_size": 64,
        "quantized_cache": False,
    }
    found = support.layer_problem(**(layer | change))
    assert found is None if problem is None else problem in found


def test_a_changed_signature_is_told() -> None:
    def method(self: object, tokens: object) -> None: ...

    assert versions.signature_problem(method, ("self", "tokens")) is None
    problem = versions.signature_problem(method, ("self", "tokens", "output"))
    assert problem is not None
    assert problem.endswith("method takes (self, tokens), expected (self, tokens, output)")


def test_settings_of_an_engine() -> None:
    config = {"nwor_specpv": {"strict": True}, "gdn_prefill_backend": "x"}
    assert read_settings(config, {}).strict is True
    assert read_settings({}, {"NWOR_SPECPV_STAGING_ROWS": "7"}).staging_rows == 7
    assert read_settings(None, {}).enable_nwor is True
    with pytest.raises(NworError, match=r"unknown key 'strickt'.*nearest is 'strict'"):
        read_settings({"nwor_specpv": {"strickt": True}}, {})
    with pytest.raises(NworError, match="unknown key 'nwor-specpv'; write 'nwor_specpv'"):
        read_settings({"nwor-specpv": {}}, {})
    with pytest.raises(NworError, match=r"NWOR_SPECPV_STAGING_ROW,.*NWOR_SPECPV_STAGING_ROWS"):
        read_settings({}, {"NWOR_SPECPV_STAGING_ROW": "7"})


def test_head_sizes_that_our_attention_has_on_cuda() -> None:
    """The plugin's list against what the library says of its own route."""
    path = Path(support.__file__).with_name("backend") / "flash_layer.py"
    text = path.read_text(encoding="utf-8")
    (listed,) = re.findall(r"^KERNEL_HEAD_SIZES = \((.*)\)$", text, re.MULTILINE)
    served = []
    for size in range(8, 257, 8):
        rows = torch.zeros(1, 1, size, dtype=torch.bfloat16)
        cache = torch.zeros(1, 16, 1, size, dtype=torch.bfloat16)
        where = [torch.tensor(values, dtype=torch.int32) for values in ([[0]], [1], [0, 1])]
        with pytest.raises(NworError) as refusal:
            verify_attention(rows, rows, rows, cache, cache, *where, None, 1.0, route="cuda")
        (missing,) = re.findall(r"^cuda\b.* missing (.*)$", str(refusal.value), re.MULTILINE)
        if "head size" not in missing:
            served.append(size)
    assert served == [int(word) for word in listed.split(", ")]
