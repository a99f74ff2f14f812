"""Where vLLM's arguments become an engine's configuration: `enable_specpv` and `draft_tree` fill in
the rest.

Up to four methods are replaced, each after a check of its signature:

* `make_speculation` gets the keys of the speculative config that were left open;
* `choose_graphs` captures graphs for more rows, which drafts make of a batch;
* `prefers_runner_v2`, which not every version has, says yes where our speculators are to draft;
* `make_config` sets the scheduler class, which needs the configuration as vLLM has resolved it, and
  logs one line with what was set.

What is set follows from `nwor_specpv.vllm.defaults`. Without the two settings nothing changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nwor_specpv.config import Settings
from nwor_specpv.errors import logger
from nwor_specpv.vllm import defaults, versions
from nwor_specpv.vllm.settings import read_settings
from nwor_specpv.vllm.specpv.rules import LOSSLESS, REFRESH

from . import speculators
from .wrapping import replace

Method = Callable[..., Any]

# The largest graph that vLLM captures unless told otherwise.
_STOCK_GRAPH_ROWS = 512


def install() -> str | None:
    """Replaces the methods, once; the problem, if one is not as expected."""
    vllm = versions.adapter
    return (
        replace(vllm.make_speculation, _make_speculation)
        or replace(vllm.choose_graphs, _choose_graphs)
        or (vllm.prefers_runner_v2 and replace(vllm.prefers_runner_v2, _prefer_runner_v2))
        or replace(vllm.make_config, _make_config)
    )


def platform() -> str:
    """`cuda`, `cpu`, or nothing where long contexts do not run."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return "cuda"
    return "cpu" if current_platform.is_cpu() else ""


def _asked(additional_config: Any, model: Any) -> Settings | None:
    """The settings, if they ask for long contexts and this engine could have them."""
    settings = read_settings(additional_config)
    fits = settings.enable_nwor and settings.specpv_mode in (LOSSLESS, REFRESH)
    if not settings.enable_specpv or not fits or not platform():
        return None
    return settings if model is None or model.runner_type == "generate" else None


def _runner_said() -> bool | None:
    from vllm import envs

    return envs.VLLM_USE_V2_MODEL_RUNNER


def _speculation(arguments: Any, settings: Settings) -> dict[str, Any]:
    """Keys of the speculative config that these EngineArgs leave open."""
    said = _said_speculation(arguments)
    return defaults.speculation(settings.specpv_mode, said, on_cpu=platform() == "cpu")


def _tree_speculation(arguments: Any) -> dict[str, Any]:
    """The same for draft trees."""
    settings = read_settings(arguments.additional_config)
    if not settings.enable_nwor:
        return {}
    return defaults.tree_speculation(settings.draft_tree, _said_speculation(arguments))


def _said_speculation(arguments: Any) -> dict[str, Any]:
    said = {key.replace("-", "_"): v for key, v in (arguments.speculative_config or {}).items()}
    flags = {
        "method": arguments.spec_method,
        "model": arguments.spec_model,
        "num_speculative_tokens": arguments.spec_tokens,
    }
    said |= {key: value for key, value in flags.items() if value is not None}
    if said.get("num_speculative_tokens_per_batch_size"):  # then vLLM takes their number from there
        said.setdefault("num_speculative_tokens", 0)
    return said


def _make_speculation(original: Method) -> Method:
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        settings = _asked(self.additional_config, target_model_config)
        added = _speculation(self, settings) if settings is not None else _tree_speculation(self)
        said = self.speculative_config
        if added:
            self.speculative_config = dict(said or {}) | added
        try:
            return original(self, target_model_config, target_parallel_config)
        finally:
            if added:
                self.speculative_config = said  # the arguments may be used again

    return create_speculative_config


def _choose_graphs(original: Method) -> Method:
    def _set_cudagraph_sizes(self: Any) -> None:
        graphs, scheduling = self.compilation_config, self.scheduler_config
        said = graphs.cudagraph_capture_sizes is not None
        said = said or graphs.max_cudagraph_capture_size is not None
        original(self)
        if said or not _has_long_steps(self):
            return
        if not graphs.cudagraph_capture_sizes or self.speculative_config is None:
            return
        more = defaults.graph_rows(
            scheduling.max_num_seqs,
            1 + self.num_speculative_tokens,
            graphs.max_cudagraph_capture_size,
            scheduling.max_num_batched_tokens,
        )
        if more:
            graphs.cudagraph_capture_sizes = graphs.cudagraph_capture_sizes + more
            graphs.max_cudagraph_capture_size = None
            original(self)

    return _set_cudagraph_sizes


def _has_long_steps(vllm_config: Any) -> bool:
    """Whether requests have many rows in a step, always the same number."""
    settings = _asked(vllm_config.additional_config, vllm_config.model_config)
    if settings is not None:
        return settings.specpv_mode == LOSSLESS
    return speculators.drafts_trees(vllm_config) and not _chooses_rows(vllm_config)


def _prefer_runner_v2(original: Method) -> Method:
    def _is_default_v2_model_runner_model(self: Any) -> bool:
        return original(self) or _drafts_on_v2(self)

    return _is_default_v2_model_runner_model


def _drafts_on_v2(vllm_config: Any) -> bool:
    """Whether our speculator is to draft."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in defaults.DRAFTED_ON_V2:
        return False
    if platform() != "cuda":
        return False
    if speculators.drafts_trees(vllm_config):
        return True
    settings = _asked(vllm_config.additional_config, vllm_config.model_config)
    return settings is not None and settings.specpv_mode == LOSSLESS


def _make_config(original: Method) -> Method:
    def create_engine_config(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        read_settings(self.additional_config)  # a wrong key is refused before a model is read
        config = original(self, usage_context, headless)
        settings = _asked(self.additional_config, config.model_config)
        if settings is not None:
            filled = _fill(self, config, settings)
            if filled:
                logger.info("%s", defaults.line("enable_specpv", filled))
        elif speculators.drafts_trees(config):
            filled = _fill_for_trees(self, config)
            if filled:
                logger.info("%s", defaults.line("draft_tree", filled))
        return config

    return create_engine_config


def _chooses_rows(vllm_config: Any) -> bool:
    """Whether rows of draft trees, if there are any, are chosen while serving."""
    return read_settings(vllm_config.additional_config).draft_tree == "auto"


def _fill_for_trees(arguments: Any, config: Any) -> list[str]:
    filled = []
    if _chooses_rows(config) and arguments.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = defaults.TREE_SCHEDULER
        filled.append(f"scheduler class {defaults.TREE_SCHEDULER}")
    return filled + _more_graphs(arguments, config)


def _fill(arguments: Any, config: Any, settings: Settings) -> list[str]:
    """Sets what needs the finished configuration; says everything that was left open and is set."""
    filled = []
    added = _speculation(arguments, settings)
    if added:
        filled.append(f"speculative config {json.dumps(added)}")
    if _runner_said() is None and config.use_v2_model_runner and _needed_a_push(config):
        filled.append("model runner V2")
    if arguments.scheduler_cls is None and _choose_scheduler(config, settings):
        filled.append(f"scheduler class {config.scheduler_config.scheduler_cls}")
    return filled + _more_graphs(arguments, config)


def _more_graphs(arguments: Any, config: Any) -> list[str]:
    rows = config.compilation_config.max_cudagraph_capture_size or 0
    more = rows > _STOCK_GRAPH_ROWS and not _said_graphs(arguments)
    return [f"CUDA graphs up to {rows} rows"] if more else []


def _needed_a_push(config: Any) -> bool:
    """Whether vLLM would have taken model runner V1."""
    if versions.adapter.prefers_runner_v2 is None:
        return False
    chosen = type(config)._is_default_v2_model_runner_model
    return not chosen.__wrapped__(config)


def _said_graphs(arguments: Any) -> bool:
    graphs = arguments.compilation_config
    values = (
        arguments.cudagraph_capture_sizes,
        arguments.max_cudagraph_capture_size,
        graphs.cudagraph_capture_sizes,
        graphs.max_cudagraph_capture_size,
    )
    return any(value is not None for value in values)


def _choose_scheduler(config: Any, settings: Settings) -> bool:
    speculative = config.speculative_config
    chosen = defaults.scheduler(
        settings.specpv_mode,
        speculative.method if speculative is not None else "",
        runner_v2=platform() == "cuda" and config.use_v2_model_runner,
        asynchronous=bool(config.scheduler_config.async_scheduling),
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
    )
    if chosen is not None:
        config.scheduler_config.scheduler_cls = chosen
    return chosen is not None
