"""What is refused at start: loudly off, or an error where `strict` asks for it. Never half on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import STOCK, drive, greedy, own_engine, start, story_prompts

from nwor_specpv import NworError
from nwor_specpv.vllm import plugin, support
from nwor_specpv.vllm.engine import Engine

Change = Callable[[pytest.MonkeyPatch, Any], None]


def of(section: str, name: str, value: object) -> Change:
    return lambda patch, config: patch.setattr(getattr(config, section), name, value)


def with_connector(patch: pytest.MonkeyPatch, config: Any) -> None:
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    patch.setattr(config, "kv_transfer_config", connector)


def with_latents(patch: pytest.MonkeyPatch, config: Any) -> None:
    patch.setattr(type(config.model_config), "use_mla", property(lambda _: True))


def with_writes_in_pieces(patch: pytest.MonkeyPatch, config: Any) -> None:
    """As use_inductor_graph_partition has it: graphs end at attention, writes are in them."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = config.compilation_config
    patch.setattr(compilation, "mode", CompilationMode.VLLM_COMPILE)
    patch.setattr(compilation, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
    patch.setattr(compilation, "splitting_ops", list(compilation._attention_ops))


def with_another_runner(patch: pytest.MonkeyPatch, _: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    name = "_update_states_after_model_execute"
    patch.setattr(GPUModelRunner, name, lambda self, output_token_ids: None)


REFUSED: dict[str, tuple[Change, str]] = {
    "pipeline": (of("parallel_config", "pipeline_parallel_size", 2), "pipeline parallelism of 2"),
    "context": (of("parallel_config", "decode_context_parallel_size", 2), "context parallelism"),
    "overlap": (of("parallel_config", "enable_dbo", True), "dual batch overlap"),
    "micro-batches": (of("parallel_config", "ubatch_size", 2), "dual batch overlap"),
    "connector": (with_connector, "KV connector ExampleConnector"),
    "latents": (with_latents, "MLA"),
    "cascade": (of("model_config", "disable_cascade_attn", False), "cascade attention"),
    "sharing": (of("cache_config", "kv_sharing_fast_prefill", True), "fast prefill"),
    "pieces": (with_writes_in_pieces, "K/V writes within piecewise CUDA graphs"),
    "signature": (
        with_another_runner,
        "takes (self, output_token_ids), expected (self, output_token_ids, scheduler_output)",
    ),
}


@pytest.fixture(scope="module")
def config() -> Any:
    return start(STOCK).llm_engine.vllm_config


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_go_together_is_refused(
    kind: str, config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real configuration with one thing changed that the CPU platform would not let through."""
    change, reason = REFUSED[kind]
    change(monkeypatch, config)
    monkeypatch.setattr(config, "additional_config", {"nwor_specpv": {}})
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        engine = Engine(config)
    assert engine.off is not None
    assert reason in engine.off
    assert f"nwor_specpv is off: {engine.off}" in caplog.text
    monkeypatch.setattr(config, "additional_config", {"nwor_specpv": {"strict": True}})
    with pytest.raises(NworError, match=re.escape(reason)):
        Engine(config)


def test_the_same_configuration_is_let_in_unchanged(config: Any) -> None:
    """Or the test above would show nothing."""
    assert support.refusals(support.describe(config)) == []


@pytest.mark.parametrize("partition", [False, True])
def test_pieces_that_vllm_makes_by_default_are_let_in(partition: bool) -> None:
    """Compiled, on a GPU: writes stand between graphs, unless inductor makes the pieces."""
    from vllm.config import CompilationConfig

    graphs = CompilationConfig(
        mode=3, cudagraph_mode="FULL_AND_PIECEWISE", use_inductor_graph_partition=partition
    )
    graphs.set_splitting_ops_for_v1(all2all_backend="allgather_reducescatter")
    assert graphs.splitting_ops_contain_attention()
    assert support._writes_in_pieces(graphs) is partition


def test_flags_that_we_tell_users_to_change_are_vllms() -> None:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = set(make_arg_parser(FlexibleArgumentParser())._option_string_actions)
    named = set(re.findall(r"--[a-z-]+", Path(support.__file__).read_text()))
    assert len(named) > 5
    assert named - known == set()


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0"])
def test_another_vllm_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm.version
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(vllm.version, "__version__", version)
    registered: list[Any] = []
    monkeypatch.setattr(registry, "register_backend", lambda *given: registered.append(given))
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        plugin.register()
    assert registered == []
    assert f"nwor_specpv is off: vLLM {version} is installed, expected 0.26.0" in caplog.text
    monkeypatch.setenv("NWOR_SPECPV_STRICT", "1")
    with pytest.raises(NworError, match=f"vLLM {version} is installed"):
        plugin.register()
    assert registered == []


# ---- single layers ----

# ALiBi in every layer, and a head size we could serve.
ALIBI = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "vocab_size": 512,
    "hidden_size": 128,
    "n_layer": 2,
    "n_head": 4,
    "seq_length": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@pytest.mark.slow
def test_a_model_we_cannot_serve_is_vllms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ALIBI))
    model = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
    found = [drive(start(STOCK, **model), story_prompts(3), greedy(20)).tokens]
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        found.append(drive(start({}, **model), story_prompts(3), greedy(20)).tokens)
    assert "nwor_specpv leaves a layer to vLLM: ALiBi slopes" in caplog.text
    assert found[0] == found[1]
    assert own_engine().off is None
    assert own_engine().interceptor is None, "nothing of ours has run"
    with pytest.raises(Exception, match="a layer has ALiBi slopes"):
        start({"strict": True}, **model)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_sharing_target_layer_name": "layers.0"}, "it shares the K/V of layers.0"),
        ({"alibi_slopes": [1.0] * 4}, "ALiBi slopes"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"head_size": 264}, "a head size of 264"),
    ],
    ids=["sharing", "alibi", "sinks", "head"],
)
def test_a_layer_we_cannot_serve_is_vllms(
    change: dict, problem: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer alone: others of the same model are staged."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from nwor_specpv.vllm import layer
    from nwor_specpv.vllm.cpu_backend import NworCpuImpl

    shape = {"num_heads": 4, "head_size": 32, "scale": 1.0, "num_kv_heads": 2}
    shape |= {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    for strict in (False, True):
        monkeypatch.setattr(config, "additional_config", {"nwor_specpv": {"strict": strict}})
        engine = Engine(config)
        monkeypatch.setattr(layer, "engine_of", lambda _, engine=engine: engine)
        with set_current_vllm_config(config):
            assert type(NworCpuImpl(**shape)) is NworCpuImpl
            if strict:
                with pytest.raises(NworError, match=f"a layer has {problem}"):
                    NworCpuImpl(**(shape | change))
            else:
                assert type(NworCpuImpl(**(shape | change))) is CPUAttentionBackendImpl
