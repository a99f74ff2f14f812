"""What is refused at start: loudly off, or an error where `strict` asks for it. Never half on."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.vllm import plugin, support, versions
from nwor_specpv.vllm.engine import Engine
from support.configs import CHUNKED, SHARING
from support.engines import STOCK, drive, greedy, own_engine, start, story_prompts
from support.flash_double import flash_attention
from support.installed import ADAPTER, server_arguments_module

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


def with_model(name: str, value: object) -> Change:
    """A property of the model's configuration."""
    return lambda patch, config: patch.setattr(
        type(config.model_config), name, property(lambda _: value)
    )


def with_sharing_layers(patch: pytest.MonkeyPatch, config: Any) -> None:
    text = config.model_config.hf_text_config
    patch.setattr(text, "num_kv_shared_layers", 2, raising=False)


def with_sharing_drafter(patch: pytest.MonkeyPatch, config: Any) -> None:
    draft = SimpleNamespace(hf_config=SimpleNamespace(model_type="gemma4_mtp"))
    patch.setattr(config.speculative_config, "method", "mtp")
    patch.setattr(config.speculative_config, "draft_model_config", draft)


def with_another_runner(patch: pytest.MonkeyPatch, _: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    name = "_update_states_after_model_execute"
    patch.setattr(GPUModelRunner, name, lambda self, output_token_ids: None)


REFUSED: dict[str, tuple[Change, str]] = {
    "pipeline": (of("parallel_config", "pipeline_parallel_size", 2), "pipeline parallelism of 2"),
    "context": (of("parallel_config", "decode_context_parallel_size", 2), "context parallelism"),
    "overlap": (of("parallel_config", "enable_dbo", True), "dual batch overlap"),
    "micro-batches": (of("parallel_config", "ubatch_size", 2), "dual batch overlap"),
    "connector": (with_connector, "KV connector ExampleConnector was not tried"),
    "latents": (with_latents, "MLA"),
    "cascade": (of("model_config", "disable_cascade_attn", False), "cascade attention"),
    "sharing": (of("cache_config", "kv_sharing_fast_prefill", True), "fast prefill"),
    "pieces": (with_writes_in_pieces, "K/V writes within piecewise CUDA graphs"),
    "sharing layers": (with_sharing_layers, "2 layers attend to the K/V of other layers"),
    "sharing drafter": (with_sharing_drafter, "this drafter attends to the K/V"),
    "chunks": (of("model_config", "attention_chunk_size", 32), "attention in chunks of 32 tokens"),
    "images": (with_model("is_mm_prefix_lm", True), "attention to both sides within images"),
    "answers": (with_model("rswa_window", 128), "answers see only the latest 128 tokens"),
    "encoder": (with_model("is_encoder_decoder", True), "encoder-decoder models"),
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
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = server_arguments_module().make_arg_parser(FlexibleArgumentParser())
    known = set(parser._option_string_actions)
    named = set(re.findall(r"--[a-z-]+", Path(support.__file__).read_text()))
    assert len(named) > 5
    assert named - known == set()


@pytest.mark.parametrize("version", ["0.25.1", "0.99.0"])
@pytest.mark.quick
def test_another_vllm_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that the plugin wraps has another parameter there."""
    import vllm.version
    from vllm.v1.attention.backends import registry

    plugin.register()  # vLLM's level of logging is ours from here on
    other = dataclasses.replace(ADAPTER.plan_step_v1, parameters=("self", "plan"))
    monkeypatch.setattr(
        versions,
        "ADAPTERS",
        tuple(dataclasses.replace(known, plan_step_v1=other) for known in versions.ADAPTERS),
    )
    monkeypatch.setattr(vllm.version, "__version__", version)
    registered: list[Any] = []
    monkeypatch.setattr(registry, "register_backend", lambda *given: registered.append(given))
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        plugin.register()
    assert registered == []
    said = f"nwor_specpv is off: vLLM {version} is not supported; run `pip install vllm=="
    assert said in caplog.text
    monkeypatch.setenv("NWOR_SPECPV_STRICT", "1")
    with pytest.raises(NworError, match=f"vLLM {version} is not supported"):
        plugin.register()
    assert registered == []


@pytest.mark.parametrize("version", ["0.25.1", "0.99.0"])
@pytest.mark.quick
def test_another_vllm_whose_functions_fit_is_served_with_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm.version

    plugin.register()  # vLLM's level of logging is ours from here on
    monkeypatch.setattr(versions, "adapter", None)
    monkeypatch.setattr(versions, "_served", "")
    monkeypatch.setattr(vllm.version, "__version__", version)
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        plugin.register()
        plugin.register()
    assert versions.adapter is ADAPTER
    said = f"vLLM {version} was not tested; it has the functions of vLLM {ADAPTER.version}"
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("backend", [plugin.CPU_BACKEND, plugin.CUDA_BACKEND], ids=["cpu", "cuda"])
@pytest.mark.quick
def test_no_fused_op_writes_past_our_backends(backend: str) -> None:
    """From 0.33 on vLLM asks the backend of a layer whether a model's op may write its K/V."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    with flash_attention(plugin.CUDA_BACKEND):
        ours = resolve_obj_by_qualname(backend)
    assert vars(ours)["supports_kv_cache_update_bypass"] is False
    known = set(ADAPTER.backend_flags.fields)
    # A flag that nobody has read may be a way past our write.
    from vllm.v1.attention.backend import AttentionBackend

    assert set(AttentionBackend.__annotations__) == known


# ---- models that attend otherwise ----


@pytest.fixture
def random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such that attention matters: vLLM's own made-up weights are next to nothing."""
    import vllm.model_executor.model_loader.dummy_loader as loader

    def fill(_: Any, model: torch.nn.Module, *__: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.state_dict().items():
            if weight.is_floating_point():
                drawn = 0.35 * torch.randn(weight.shape, generator=generator)
                weight.copy_(torch.ones_like(weight) if "norm" in name else drawn)

    monkeypatch.setattr(loader.DummyModelLoader, "load_weights", torch.no_grad()(fill))


def made_up(folder: Path, config: dict) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}


REPEATING = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7] * 3, [9, 10, 11, 9, 10, 11, 9, 10] * 2]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(SHARING, "2 layers attend to the K/V of other layers", id="sharing"),
        pytest.param(CHUNKED, "in chunks of 32 tokens", id="chunks", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("random_weights")
def test_a_model_that_attends_otherwise_is_vllms(config: dict, reason: str, tmp_path: Path) -> None:
    model = made_up(tmp_path, config)
    wanted = drive(start(STOCK, **model), REPEATING, greedy(40)).tokens
    found = drive(start({}, **model), REPEATING, greedy(40)).tokens
    assert found == wanted
    assert reason in own_engine().off
    with pytest.raises(Exception, match=reason):
        start({"strict": True}, **model)


@pytest.mark.slow
@pytest.mark.usefixtures("random_weights")
def test_layers_whose_metadata_another_builder_makes_are_vllms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kind of layer that no configuration tells of; the last layer is an ordinary one."""
    model = made_up(tmp_path, CHUNKED)
    wanted = drive(start(STOCK, **model), REPEATING, greedy(40)).tokens
    monkeypatch.setattr(support, "refusals", lambda _: [])
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        found = drive(start({"check_contract": True}, **model), REPEATING, greedy(40)).tokens
    assert found == wanted
    assert "leaves a layer to vLLM: it has metadata of ChunkedLocalAttentionBuilder" in caplog.text
    assert own_engine().own_layers == ["model.layers.3.self_attn.attn"]
    assert "check_contract is ignored: layers of this model share cache memory" in caplog.text
    assert own_engine().violations == []
    with pytest.raises(Exception, match="a layer has metadata of ChunkedLocalAttentionBuilder"):
        start({"strict": True}, **model)


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
    model = made_up(tmp_path, ALIBI)
    found = [drive(start(STOCK, **model), story_prompts(3), greedy(20)).tokens]
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        found.append(drive(start({}, **model), story_prompts(3), greedy(20)).tokens)
    assert "nwor_specpv leaves a layer to vLLM: it has ALiBi slopes" in caplog.text
    assert found[0] == found[1]
    assert own_engine().off is None
    assert own_engine().interceptor is None, "nothing of ours has run"
    with pytest.raises(Exception, match="a layer has ALiBi slopes"):
        start({"strict": True}, **model)


SHAPE = {"num_heads": 4, "head_size": 32, "scale": 1.0, "num_kv_heads": 2}
SHAPE |= {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}


def engine_for(config: Any, patch: pytest.MonkeyPatch, **nwor: Any) -> Engine:
    """What layers find when they are built."""
    from nwor_specpv.vllm.backend import layer

    patch.setattr(config, "additional_config", {"nwor_specpv": nwor})
    engine = Engine(config)
    patch.setattr(layer, "engine_of", lambda _: engine)
    return engine


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_sharing_target_layer_name": "layers.0"}, "no K/V of its own but that of layers.0"),
        ({"alibi_slopes": [1.0] * 4}, "ALiBi slopes"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"head_size": 264}, "a head size of 264"),
    ],
    ids=["sharing", "alibi", "sinks", "head"],
)
def test_a_layer_we_cannot_serve_is_vllms(
    change: dict, problem: str, config: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The layer alone: others of the same model are staged. `layers.0` is none of ours."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from nwor_specpv.vllm.backend.cpu import NworCpuImpl

    for strict in (False, True):
        engine_for(config, monkeypatch, strict=strict)
        with set_current_vllm_config(config):
            assert type(NworCpuImpl(**SHAPE)) is NworCpuImpl
            if strict:
                with pytest.raises(NworError, match=f"a layer has {problem}"):
                    NworCpuImpl(**(SHAPE | change))
            else:
                with caplog.at_level(logging.WARNING, "nwor_specpv"):
                    assert type(NworCpuImpl(**(SHAPE | change))) is CPUAttentionBackendImpl
                assert f"nwor_specpv leaves a layer to vLLM: it has {problem}" in caplog.text


def test_nobody_reads_drafts_from_a_cache_of_ours(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a layer of the model, nor one of a drafter, which is told where to read later."""
    from vllm.config import set_current_vllm_config

    from nwor_specpv.vllm.backend.cpu import NworCpuImpl
    from nwor_specpv.vllm.backend.layer import own_layers

    engine_for(config, monkeypatch)
    context = config.compilation_config.static_forward_context
    with set_current_vllm_config(config):
        source = SimpleNamespace(impl=NworCpuImpl(**SHAPE), kv_sharing_target_layer_name=None)
        monkeypatch.setitem(context, "layers.0", source)
        with pytest.raises(NworError, match=r"a layer attends to the K/V of layers\.0"):
            NworCpuImpl(**(SHAPE | {"kv_sharing_target_layer_name": "layers.0"}))
    assert own_layers(config, ["layers.0"]) == ["layers.0"]
    draft = SimpleNamespace(impl=None, kv_sharing_target_layer_name="layers.0")
    monkeypatch.setitem(context, "draft.0", draft)
    with pytest.raises(NworError, match=r"draft\.0 attends to the K/V of layers\.0"):
        own_layers(config, ["layers.0"])


def backends() -> list[Any]:
    with flash_attention(plugin.CUDA_BACKEND):  # it is importable over a GPU's functions only
        from nwor_specpv.vllm.backend.cpu import NworCpuBackend
        from nwor_specpv.vllm.backend.cuda import NworFlashBackend

    return [NworCpuBackend, NworFlashBackend]


@pytest.mark.parametrize("place", [0, 1], ids=["cpu", "cuda"])
def test_backends_that_vllm_makes_of_ours_have_its_own_layers(
    place: int, config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their builders change a step's requests, lengths or mask before ours sees them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import (
        chunked_local_attention,
        encoder_only_attention,
        static_sink_attention,
    )

    ours = backends()[place]
    made = [
        chunked_local_attention.create_chunked_local_attention_backend(ours, 32),
        encoder_only_attention.create_encoder_only_attention_backend(ours),
        static_sink_attention.create_static_sink_attention_backend(ours, 16),
    ]
    engine_for(config, monkeypatch)
    with set_current_vllm_config(config), caplog.at_level(logging.WARNING, "nwor_specpv"):
        impl = ours.get_impl_cls()
        assert impl is not impl.stock
        for backend in made:
            assert backend.get_impl_cls() is impl.stock
            builder = backend.get_builder_cls().__name__
            assert f"leaves a layer to vLLM: it has metadata of {builder}" in caplog.text
    engine_for(config, monkeypatch, strict=True)
    with set_current_vllm_config(config):
        assert ours.get_impl_cls() is impl
        with pytest.raises(NworError, match="a layer has metadata of ChunkedLocal"):
            made[0].get_impl_cls()


@pytest.mark.parametrize("place", [0, 1], ids=["cpu", "cuda"])
def test_attention_that_vllm_makes_of_ours_is_refused(
    place: int, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither ours nor vLLM's own can stand in its place."""
    from vllm.config import set_current_vllm_config

    engine_for(config, monkeypatch)
    with set_current_vllm_config(config):
        impl = backends()[place].get_impl_cls()

        class CrossAttentionImpl(impl):
            """As vLLM's, which writes the encoder's K/V itself."""

        for kind in ("encoder_decoder", "decoder"):
            derived = r'vLLM derives CrossAttentionImpl from our attention.*"enable_nwor": false'
            with pytest.raises(NworError, match=derived):
                CrossAttentionImpl(**SHAPE, attn_type=kind)


@pytest.mark.parametrize(
    "unfit", [{"use_mla": True}, {"use_mm_prefix": True}], ids=["MLA", "images"]
)
def test_vllm_refuses_our_backend_for_a_model_it_is_unfit_for(
    unfit: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM says on a GPU, where `--attention-backend CUSTOM` was asked for."""
    for name in ("vllm._C", "vllm._C_stable_libtorch"):  # of vLLM's wheel for GPUs
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    platform = cuda.CudaPlatformBase
    hopper = classmethod(lambda *_, **__: DeviceCapability(9, 0))
    monkeypatch.setattr(platform, "get_device_capability", hopper)
    model = AttentionSelectorConfig(64, torch.bfloat16, "auto", 16)
    plugin.register()
    with flash_attention(plugin.CUDA_BACKEND):
        chosen = platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, model)
        assert chosen == plugin.CUDA_BACKEND
        with pytest.raises(ValueError, match=r"Selected backend .*CUSTOM.* is not valid for"):
            platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, model._replace(**unfit))
