"""What partial verification in vLLM asks of a set-up: judged at start, with reason and remedy.

Users have asked for it by name, so what does not fit stops the start; nothing is switched off
behind their backs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nwor_specpv.config import Settings
from nwor_specpv.errors import NworError
from nwor_specpv.vllm.hooks.speculators import HEADS, WITHOUT_HEAD
from nwor_specpv.vllm.support import FLOAT8, Refusal, is_quantized

from .publishing import CapsPublished

DRAFTER = "nwor_specpv.vllm.specpv.drafter.PartialViewDrafter"
# With prefix caching in mode `refresh`, by whether scheduling is asynchronous.
SCHEDULERS = {
    False: "nwor_specpv.vllm.specpv.scheduler.RefreshScheduler",
    True: "nwor_specpv.vllm.specpv.scheduler.AsyncRefreshScheduler",
}
# In mode `lossless` on model runner V2.
LONG_CONTEXT_SCHEDULER = "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler"
# How users ask for mode `lossless` without a head: on GPUs, and on the CPU platform, whose vLLM has
# model runner V1 alone.
_SELF_DRAFTING = (
    f'--speculative-config \'{{"method": "{WITHOUT_HEAD}", "num_speculative_tokens": 16}}\''
)
_CLASS_DRAFTING = (
    '--speculative-config \'{"method": "custom_class", "model": '
    f'"{DRAFTER}", "num_speculative_tokens": 16}}\''
)
# The longest chain vLLM's rejection sampler takes.
MAX_DRAFTS = 128

LOSSLESS, REFRESH = "lossless", "refresh"
# Who says none of these leaves the size of views to us.
_VIEW_KEYS = (
    *("specpv_selector", "specpv_block_size", "specpv_n_sink_blocks", "specpv_n_retrieval_blocks"),
    *("specpv_n_window_blocks", "specpv_partial_threshold"),
)


@dataclass(frozen=True)
class LongContext:
    """The parts of a vLLM configuration that matter to partial verification."""

    drafter: str | None = None  # the speculative method, None: no speculation
    drafter_class: str = ""
    num_drafts: int = 0
    drafts_by_batch_size: bool = False  # vLLM chooses their number from ranges of batch sizes
    runner_v2: bool = False
    cpu: bool = False  # vLLM's CPU platform
    async_scheduling: bool = False
    prefix_caching: bool = False
    caps_published: bool | None = None  # by an asynchronous scheduler or by the other; None: nobody
    data_parallel: int = 1  # of models with experts; vLLM's engines of others know of no rank
    kv_connector: bool = False
    expert_balancing: bool = False
    lora: bool = False
    multimodal: bool = False
    max_model_len: int = 0
    cache_dtype: str = "auto"
    page_size: int = 0  # tokens; 0: not known yet


def describe(vllm_config: Any) -> LongContext:
    """The set-up of a VllmConfig."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    scheduler = scheduler_class(vllm_config.scheduler_config.scheduler_cls)
    caps = isinstance(scheduler, type) and issubclass(scheduler, CapsPublished)
    return LongContext(
        drafter=speculative.method if speculative is not None else None,
        drafter_class=str(speculative.model or "") if speculative is not None else "",
        num_drafts=(speculative.num_speculative_tokens or 0) if speculative is not None else 0,
        drafts_by_batch_size=bool(
            speculative is not None and speculative.num_speculative_tokens_per_batch_size
        ),
        runner_v2=bool(vllm_config.use_v2_model_runner),
        cpu=vllm_config.device_config.device_type == "cpu",
        async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        caps_published=scheduler.asynchronous if caps else None,
        data_parallel=vllm_config.parallel_config.data_parallel_size,
        kv_connector=vllm_config.kv_transfer_config is not None,
        expert_balancing=bool(vllm_config.parallel_config.enable_eplb),
        lora=vllm_config.lora_config is not None,
        multimodal=bool(model.is_multimodal_model or model.uses_mrope),
        max_model_len=model.max_model_len,
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        page_size=vllm_config.cache_config.block_size or 0,
    )


def scheduler_class(named: Any) -> Any:
    """The class that vLLM's `scheduler_cls` is or names; None: vLLM's own."""
    if not isinstance(named, str):
        return named
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(named)


def judge(settings: Settings, setup: LongContext, staging_off: str | None) -> None:
    """Raises NworError with everything that keeps the mode asked for from working."""
    problems = [str(refusal) for refusal in refusals(settings, setup, staging_off)]
    if problems:
        raise NworError(f"nwor_specpv, enable_specpv: {' | '.join(problems)}")


def refusals(settings: Settings, setup: LongContext, staging_off: str | None) -> list[Refusal]:
    """Everything that keeps the mode asked for from working; empty: it may start."""
    return list(_refusals(settings, setup, staging_off))


def has_guesses_alone(settings: Settings, setup: LongContext) -> bool:
    """Whether no request can be longer than a view of our own size, on model runner V2: no step is
    partial, and mode `lossless` drafts by guesses, as it does for short requests of other engines.
    """
    if settings.specpv_mode != LOSSLESS or not _on_v2(setup):
        return False
    own = Settings()
    if any(getattr(settings, name) != getattr(own, name) for name in _VIEW_KEYS):
        return False
    return setup.max_model_len <= settings.specpv().budget(1 + setup.num_drafts).static_tokens


def _on_v2(setup: LongContext) -> bool:
    return setup.runner_v2 and setup.drafter in (*HEADS, WITHOUT_HEAD)


def judge_layers(layers: Mapping[str, Any]) -> None:
    """Raises NworError for a layer that does not see the whole context."""
    for name, layer in layers.items():
        window = getattr(layer, "sliding_window", None)
        if window is not None and window > 0:
            raise NworError(
                f"nwor_specpv, enable_specpv: {name} has a sliding window of {window}, but views "
                "need layers that see the whole context; serve this model without enable_specpv"
            )


def _refusals(settings: Settings, setup: LongContext, staging_off: str | None) -> Iterator[Refusal]:
    mode, ours = settings.specpv_mode, setup.drafter_class == DRAFTER
    if staging_off is not None:
        yield Refusal(f"staging is off ({staging_off})", "remove that cause, or drop enable_specpv")
    if mode not in (LOSSLESS, REFRESH):
        yield Refusal(
            f"specpv_mode {mode!r} is not supported: vLLM feeds no token twice",
            f"use {LOSSLESS!r} (the output of full attention) or {REFRESH!r} (not lossless)",
        )
    if settings.specpv_storage != "paged" or settings.specpv_offload:
        yield Refusal(
            "specpv_storage 'compact' and specpv_offload are not supported: views are lists of "
            "vLLM's own pages",
            "use specpv_storage 'paged' without specpv_offload",
        )
    if is_quantized(setup.cache_dtype) and setup.cache_dtype not in FLOAT8:
        yield Refusal(
            f"a KV cache of {setup.cache_dtype} is not supported: views read {FLOAT8[0]} or K/V as "
            "the model computes it",
            f"use --kv-cache-dtype {FLOAT8[0]} or auto, or drop enable_specpv",
        )
    if settings.specpv_budget != "fixed":
        yield Refusal(
            f"specpv_budget {settings.specpv_budget!r} is not supported: all requests of vLLM have "
            "views of one size",
            "use specpv_budget 'fixed'",
        )
    if setup.kv_connector:
        reason = "was not tried with views"
        if mode == REFRESH:
            reason = "would keep K/V of partial steps"
        yield Refusal(f"a KV connector {reason}", "drop --kv-transfer-config, or enable_specpv")
    if mode == LOSSLESS:
        yield from _lossless(setup, max(1, settings.specpv_draft_lookup), ours=ours)
    elif mode == REFRESH and ours:
        yield Refusal(
            f"the drafter {DRAFTER} drafts for full steps, which mode {mode!r} does not have",
            f"use specpv_mode {LOSSLESS!r}, or another drafter",
        )
    elif mode == REFRESH and setup.prefix_caching:
        yield from _published(setup)
    if setup.page_size % settings.specpv_block_size:
        yield Refusal(
            f"specpv_block_size {settings.specpv_block_size} does not divide pages of "
            f"{setup.page_size} tokens",
            "use a specpv_block_size that divides them, or another --block-size",
        )
    if has_guesses_alone(settings, setup):
        return
    try:
        config = settings.specpv()
        config.validate_for(config.specpv_block_size, 1 + setup.num_drafts, setup.max_model_len)
    except NworError as error:
        yield Refusal(str(error), "give a smaller view, or a longer --max-model-len")


def _published(setup: LongContext) -> Iterator[Refusal]:
    """Of mode `refresh` with prefix caching."""
    if setup.caps_published is setup.async_scheduling:
        return
    reason = "K/V of partial steps would be published to other requests"
    if setup.caps_published is not None:
        kind = "asynchronous" if setup.async_scheduling else "synchronous"
        reason = f"the scheduler class is not the one for {kind} scheduling"
    yield Refusal(
        f"mode 'refresh' with prefix caching: {reason}",
        f"add --scheduler-cls {SCHEDULERS[setup.async_scheduling]}, or --no-enable-prefix-caching",
    )


def _lossless(setup: LongContext, guesses: int, *, ours: bool) -> Iterator[Refusal]:
    known = setup.drafter in (*HEADS, WITHOUT_HEAD)
    if known and not setup.runner_v2 and not setup.cpu:
        yield Refusal(
            f"the drafter {setup.drafter!r} needs vLLM's model runner V2 in mode 'lossless', but "
            "vLLM has chosen V1",
            "set VLLM_USE_V2_MODEL_RUNNER=1",
        )
        return
    on_v2 = _on_v2(setup)
    if not ours and not on_v2:
        remedy = _CLASS_DRAFTING if setup.cpu else _SELF_DRAFTING
        yield Refusal(
            f"the drafter {setup.drafter!r} is not for mode 'lossless', in which the target drafts "
            "itself",
            f"use a head of method 'eagle3' on model runner V2, or {remedy}",
        )
        return
    if ours and not setup.cpu:
        yield Refusal(
            f"the drafter {DRAFTER} is for the CPU platform alone: on GPUs it is slower than no "
            "drafting",
            f"use {_SELF_DRAFTING}",
        )
        return
    if on_v2 and setup.num_drafts <= guesses:
        who = "a lookup" if setup.drafter == WITHOUT_HEAD else "the head"
        yield Refusal(
            f"{setup.num_drafts} speculative tokens are too few: {who} alone drafts {guesses}",
            "use num_speculative_tokens 16, or a smaller specpv_draft_lookup",
        )
    if on_v2 and setup.drafts_by_batch_size:
        yield Refusal(
            "num_speculative_tokens_per_batch_size is not supported: steps verify a few drafts or "
            "a whole chain, by batch, context and costs",
            f"drop it, and add --scheduler-cls {LONG_CONTEXT_SCHEDULER}",
        )
    if setup.drafter == WITHOUT_HEAD and setup.expert_balancing:
        yield Refusal(
            "expert load balancing is not supported: vLLM would register the target twice, as it "
            "is the drafter, too",
            "drop --enable-eplb",
        )
    if ours and setup.runner_v2:
        yield Refusal(
            "model runner V2 takes no drafter of a class", "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if ours and setup.async_scheduling:
        yield Refusal(
            "asynchronous scheduling is not supported: the drafter needs tokens on the host",
            "add --no-async-scheduling",
        )
    if setup.data_parallel > 1:
        yield Refusal(
            f"data parallelism of {setup.data_parallel} with experts is not supported: ranks would "
            "draft with different numbers of passes",
            "use --data-parallel-size 1",
        )
    if setup.lora:
        yield Refusal(
            "LoRA is not supported: adapters are set for a step's own rows", "drop --enable-lora"
        )
    if setup.multimodal:
        yield Refusal(
            "multimodal models are not supported: drafts are at plain text positions",
            "serve this model without enable_specpv",
        )
    if setup.num_drafts > MAX_DRAFTS:
        yield Refusal(
            f"{setup.num_drafts} speculative tokens are too many: vLLM samples {MAX_DRAFTS}",
            f"use num_speculative_tokens {MAX_DRAFTS} or fewer",
        )
