"""`enable_specpv` alone: vLLM's arguments get what long contexts need, and what was said stands.

Configurations for a GPU are made on the CPU platform, where nothing is started with them.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nwor_specpv import Metrics, NworError
from nwor_specpv.models import stories
from nwor_specpv.vllm import defaults
from nwor_specpv.vllm.hooks import arguments
from nwor_specpv.vllm.specpv.rules import DRAFTER, LONG_CONTEXT_SCHEDULER, SCHEDULERS
from support.engines import (
    STOCK,
    Story,
    check_drafting,
    counted,
    drive,
    greedy,
    own_engine,
    start,
)
from support.heads import story_head
from support.installed import ADAPTER
from support.small_views import SMALL_VIEW, prompts

pytestmark = pytest.mark.serves("one switch", "V1")

LINE = "enable_specpv has set what was left open"
VLLM_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
DRAFTS = "vllm:spec_decode_num_draft_tokens"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if LINE in record.getMessage()]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nwor_specpv")


def run(llm: Any) -> Story:
    return drive(llm, prompts(), greedy(24))


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return run(start(STOCK, speculation=None)).tokens


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.quick
def test_one_switch_starts_an_engine_whose_tokens_are_vllms(
    expected: dict, caplog: pytest.LogCaptureFixture
) -> None:
    before = Metrics().snapshot()
    llm = start(SMALL_VIEW, speculation=None)
    config = llm.llm_engine.vllm_config
    assert config.speculative_config.method == "custom_class"
    assert config.speculative_config.model == DRAFTER
    assert config.speculative_config.num_speculative_tokens == 16
    assert not config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls is None
    assert own_engine().lossless
    assert own_engine().settings.specpv_max_requests == 8, "--max-num-seqs"
    (line,) = lines(caplog)
    assert f'"model": "{DRAFTER}"' in line
    assert "scheduler" not in line
    assert run(llm).tokens == expected
    assert counted(llm, DRAFTS) > 0
    check_drafting(before)


def test_mode_refresh_drafts_by_lookups_and_caps_what_is_published(
    expected: dict, caplog: pytest.LogCaptureFixture
) -> None:
    wide = {"specpv_mode": "refresh", "specpv_partial_threshold": 400}  # every step is full
    llm = start(SMALL_VIEW | wide, speculation=None, enable_prefix_caching=True)
    config = llm.llm_engine.vllm_config
    assert config.speculative_config.method == "ngram"
    assert config.scheduler_config.scheduler_cls == SCHEDULERS[False]
    (line,) = lines(caplog)
    assert f"scheduler class {SCHEDULERS[False]}" in line
    assert run(llm).tokens == expected
    assert own_engine().refresh is not None


@pytest.mark.parametrize("nwor", [{}, {"enable_specpv": False}])
def test_staging_alone_changes_nothing(nwor: dict, caplog: pytest.LogCaptureFixture) -> None:
    config = start(nwor, speculation=None).llm_engine.vllm_config
    assert config.speculative_config is None
    assert config.scheduler_config.scheduler_cls is None
    assert config.additional_config == {"nwor_specpv": nwor}
    assert lines(caplog) == []


# ---- configurations ------------------------------------------------------------------------------


def engine_args(nwor: dict[str, Any], **options: Any) -> Any:
    from vllm import EngineArgs

    return EngineArgs(
        model=str(stories()),
        dtype="float32",
        skip_tokenizer_init=True,
        additional_config={"nwor_specpv": SMALL_VIEW | nwor},
        **({"max_model_len": 512, "max_num_seqs": 96} | options),
    )


def make(nwor: dict[str, Any] | None = None, **options: Any) -> Any:
    return engine_args(nwor or {}, **options).create_engine_config()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices of a GPU, on a machine where runner V2 could run all of them."""
    from vllm.config import vllm as module
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)
    monkeypatch.setattr(arguments, "platform", lambda: "cuda")
    monkeypatch.setattr(module, "HAS_TRITON", True)
    unsupported = "_get_v2_model_runner_unsupported_features"
    monkeypatch.setattr(module.VllmConfig, unsupported, lambda _: [])


@pytest.mark.usefixtures("cuda")
def test_a_gpu_drafts_for_itself_on_runner_v2(caplog: pytest.LogCaptureFixture) -> None:
    args = engine_args({})
    for _ in range(2):  # a server makes it more than once
        config = args.create_engine_config()
        speculative = config.speculative_config
        assert speculative.method == "ngram_gpu"
        assert speculative.num_speculative_tokens == 16
        assert config.use_v2_model_runner
        assert config.scheduler_config.scheduler_cls == LONG_CONTEXT_SCHEDULER
        assert config.compilation_config.max_cudagraph_capture_size == 96 * 17
    assert args.additional_config == {"nwor_specpv": SMALL_VIEW}, "the user's own"
    first, second = lines(caplog)
    assert first == second
    for part in (
        '"method": "ngram_gpu"',
        LONG_CONTEXT_SCHEDULER,
        "CUDA graphs up to 1632 rows",
    ):
        assert part in first
    assert "runner" not in first, "vLLM chooses V2 for this model by itself"


@pytest.mark.usefixtures("cuda")
def test_vllms_own_graphs_are_kept_beside_the_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CompilationConfig

    seen = []
    chosen = CompilationConfig.post_init_cudagraph_sizes

    def look(self: Any) -> None:
        chosen(self)
        seen.append(list(self.cudagraph_capture_sizes))

    monkeypatch.setattr(CompilationConfig, "post_init_cudagraph_sizes", look)
    make(max_num_batched_tokens=8192)
    stock, ours = seen
    more = defaults.graph_rows(96, 17, 512, 8192)
    assert set(stock) >= {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)}
    assert max(stock) == 512
    assert ours == stock + more
    seen.clear()
    make(max_num_seqs=8, max_num_batched_tokens=8192)
    assert len(seen) == 1, "as stock: the graphs reach 8 requests"


@pytest.mark.usefixtures("cuda")
def test_runner_v2_is_chosen_for_models_with_experts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda _: True))
    by_default = ADAPTER.prefers_runner_v2 is None  # vLLM takes it for every model
    assert make({"enable_specpv": False}).use_v2_model_runner is by_default
    assert make().use_v2_model_runner
    assert ("model runner V2" in lines(caplog)[-1]) is not by_default
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = make()
    assert not config.use_v2_model_runner, "the user has said so; the engine will be refused"
    assert config.scheduler_config.scheduler_cls is None
    assert "runner" not in lines(caplog)[-1]


@pytest.mark.usefixtures("cuda")
def test_a_head_gets_the_scheduler_class_and_keeps_its_drafts(tmp_path: Any) -> None:
    import torch

    head = story_head(tmp_path, torch.float32)
    config = make(speculative_config=head | {"num_speculative_tokens": 7})
    assert config.speculative_config.method == "eagle3"
    assert config.speculative_config.num_speculative_tokens == 7
    assert config.scheduler_config.scheduler_cls == LONG_CONTEXT_SCHEDULER
    head.pop("num_speculative_tokens", None)
    config = make(speculative_config=head)
    assert config.speculative_config.num_speculative_tokens == 15


@pytest.mark.usefixtures("cuda")
def test_what_the_user_has_said_stands(caplog: pytest.LogCaptureFixture) -> None:
    config = make(
        {"specpv_max_requests": 3},
        speculative_config={"method": "ngram_gpu", "num-speculative-tokens": 5},
        scheduler_cls=VLLM_SCHEDULER,
        max_cudagraph_capture_size=64,
    )
    assert config.speculative_config.num_speculative_tokens == 5
    assert config.scheduler_config.scheduler_cls == VLLM_SCHEDULER
    assert config.compilation_config.max_cudagraph_capture_size == 64
    assert config.additional_config["nwor_specpv"]["specpv_max_requests"] == 3
    assert lines(caplog) == []


@pytest.mark.usefixtures("cuda")
def test_said_in_other_ways() -> None:
    config = make(spec_tokens=9, compilation_config={"cudagraph_capture_sizes": [17, 34]})
    assert config.speculative_config.method == "ngram_gpu"
    assert config.speculative_config.num_speculative_tokens == 9
    assert config.compilation_config.max_cudagraph_capture_size == 34
    config = make(spec_method="ngram", spec_tokens=3)
    assert config.speculative_config.method == "ngram"
    assert config.speculative_config.num_speculative_tokens == 3
    assert config.scheduler_config.scheduler_cls is None


def test_what_does_not_fit_is_still_refused() -> None:
    with pytest.raises(NworError, match="'ngram' is not for mode 'lossless'"):
        start(SMALL_VIEW)
    with pytest.raises(NworError, match="unknown key 'specpv_max_request'"):
        make({"specpv_max_request": 2})


def test_embedding_models_have_nothing_to_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch may stand in the environment of several servers."""
    from vllm.config import ModelConfig

    pooling = engine_args({})
    made = pooling.create_model_config()
    monkeypatch.setattr(made, "runner_type", "pooling")
    monkeypatch.setattr(type(pooling), "create_model_config", lambda _: made)
    assert isinstance(made, ModelConfig)
    assert pooling.create_speculative_config(made, None) is None


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("tree", "rows"), [(32, 2048), (8, 768), ("auto", 512)])
def test_steps_of_whole_trees_have_graphs(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, tree: int | str, rows: int
) -> None:
    import torch

    head = story_head(tmp_path, torch.float32)
    head.pop("num_speculative_tokens", None)
    options = {"speculative_config": head, "max_num_batched_tokens": 8192}
    config = make({"enable_specpv": False, "draft_tree": tree}, **options)
    assert config.compilation_config.max_cudagraph_capture_size == rows
    (line,) = [said for said in caplog.messages if "draft_tree has set" in said]
    assert (f"CUDA graphs up to {rows} rows" in line) is (rows > 512)
    more = {"max_cudagraph_capture_size": 64}
    config = make({"enable_specpv": False, "draft_tree": tree}, **options, **more)
    assert config.compilation_config.max_cudagraph_capture_size == 64, "the user has said so"
