"""What draft trees ask of a set-up: judged at start, with reason and remedy.

Users have asked for trees by name, so what does not fit stops the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nwor_specpv.config import Settings
from nwor_specpv.errors import NworError
from nwor_specpv.vllm.defaults import tree_drafts, tree_ranges
from nwor_specpv.vllm.hooks.speculators import HEADS
from nwor_specpv.vllm.specpv.rules import scheduler_class
from nwor_specpv.vllm.support import Refusal

from .shape import ARM_ROWS

# What logits of a full batch may take: vLLM does not count them when it measures memory.
MAX_LOGIT_BYTES = 2 << 30
_SHORTER = "lower draft_tree or --max-num-seqs"


@dataclass(frozen=True)
class TreeSetup:
    """The parts of a vLLM configuration that matter to draft trees."""

    drafter: str | None = None  # the speculative method, None: no speculation
    num_drafts: int = 0
    drafts_by_requests: tuple[tuple[int, int, int], ...] = ()  # (first, last, drafts)
    draft_sampling: str = "greedy"
    acceptance: str = "standard"  # how vLLM is to accept drafts
    chooses_rows: bool = False  # its scheduler does
    runner_v2: bool = True
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    multimodal: bool = False
    hybrid: bool = False
    mla: bool = False
    lora: bool = False
    sampling_mask: bool = False
    kv_connector: bool = False
    max_requests: int = 1
    max_tokens: int = 1  # rows of a step
    draft_bytes: int = 0  # K/V of one draft
    logit_bytes: int = 0  # of one row


def describe(vllm_config: Any) -> TreeSetup:
    """The set-up of a VllmConfig."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    parallel, scheduling = vllm_config.parallel_config, vllm_config.scheduler_config
    per_layer = model.get_num_kv_heads(parallel) * model.get_head_size() * model.dtype.itemsize
    return TreeSetup(
        drafter=getattr(speculative, "method", None),
        num_drafts=getattr(speculative, "num_speculative_tokens", None) or 0,
        drafts_by_requests=tuple(
            map(tuple, getattr(speculative, "num_speculative_tokens_per_batch_size", None) or ())
        ),
        draft_sampling=getattr(speculative, "draft_sample_method", None) or "greedy",
        acceptance=getattr(speculative, "rejection_sample_method", None) or "standard",
        chooses_rows=bool(
            getattr(scheduler_class(scheduling.scheduler_cls), "chooses_rows", False)
        ),
        runner_v2=bool(vllm_config.use_v2_model_runner),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        multimodal=bool(model.is_multimodal_model or model.uses_mrope),
        hybrid=bool(model.is_hybrid),
        mla=bool(model.use_mla),
        lora=vllm_config.lora_config is not None,
        sampling_mask=bool(getattr(model, "return_sampling_mask", False)),
        kv_connector=vllm_config.kv_transfer_config is not None,
        max_requests=scheduling.max_num_seqs,
        max_tokens=scheduling.max_num_batched_tokens,
        draft_bytes=2 * model.get_num_layers(parallel) * per_layer,
        logit_bytes=4 * model.get_vocab_size(),
    )


def judge(settings: Settings, setup: TreeSetup, staging_off: str | None) -> None:
    """Raises NworError with everything that keeps trees from working."""
    problems = [str(refusal) for refusal in refusals(settings, setup, staging_off)]
    if problems:
        raise NworError(f"nwor_specpv, draft_tree: {' | '.join(problems)}")


def refusals(settings: Settings, setup: TreeSetup, staging_off: str | None) -> list[Refusal]:
    """Everything that keeps trees from working; empty: it may start."""
    found = [*_of_settings(settings, setup, staging_off), *_of_engine(setup), *_of_model(setup)]
    return [*found, *_of_memory(settings, setup)]


def judge_layers(layers: Mapping[str, Any]) -> None:
    """Raises NworError for a layer that does not see the whole context."""
    for name, layer in layers.items():
        window = getattr(layer, "sliding_window", None)
        if window is not None and window > 0:
            raise NworError(
                f"nwor_specpv, draft_tree: {name} has a sliding window of {window}, but rows of a "
                "tree need layers that see the whole context; serve this model without draft_tree"
            )


def _of_settings(
    settings: Settings, setup: TreeSetup, staging_off: str | None
) -> Iterator[Refusal]:
    if staging_off is not None:
        yield Refusal(f"staging is off ({staging_off})", "remove that cause, or drop draft_tree")
    if settings.enable_specpv:
        yield Refusal(
            "enable_specpv drafts chains over views, which are no trees",
            "use enable_specpv for long contexts, or draft_tree for short ones",
        )
    if setup.drafter is not None and setup.drafter not in HEADS:
        yield Refusal(
            f"method {setup.drafter} has no head that could draft a tree",
            f"use method {' or '.join(HEADS)} with a trained head",
        )
    if setup.drafter in HEADS:
        yield from _of_length(settings, setup)
    if setup.draft_sampling != "greedy":
        yield Refusal(
            f"draft_sample_method {setup.draft_sampling!r} draws one chain of drafts",
            "drop it from --speculative-config: sampled requests keep vLLM's distribution",
        )
    if setup.acceptance != "standard":
        yield Refusal(
            f"rejection_sample_method {setup.acceptance!r} is one of chains",
            "drop it from --speculative-config",
        )


def _of_length(settings: Settings, setup: TreeSetup) -> Iterator[Refusal]:
    tree, drafts = settings.draft_tree, setup.num_drafts
    if drafts != tree_drafts(tree):
        yield Refusal(
            f"num_speculative_tokens is {drafts}, but trees have up to {tree_drafts(tree)} drafts",
            "drop num_speculative_tokens from --speculative-config",
        )
    elif list(setup.drafts_by_requests) != tree_ranges(tree):
        yield Refusal(
            "num_speculative_tokens_per_batch_size was set to lengths of chains",
            "drop it from --speculative-config",
        )
    if tree == "auto" and not setup.chooses_rows:
        yield Refusal(
            "the scheduler class that was set chooses no rows",
            "drop --scheduler-cls, or set draft_tree to a number of rows",
        )


def _of_engine(setup: TreeSetup) -> Iterator[Refusal]:
    if not setup.runner_v2:
        yield Refusal(
            "model runner V1 samples the last token of a chain apart from its drafts",
            "set VLLM_USE_V2_MODEL_RUNNER=1",
        )
    for name, size in (
        ("tensor", setup.tensor_parallel),
        ("pipeline", setup.pipeline_parallel),
        ("data", setup.data_parallel),
    ):
        if size > 1:
            yield Refusal(
                f"{name} parallelism of {size} was not tested with trees",
                f"use --{name}-parallel-size 1",
            )
    if setup.lora:
        yield Refusal("LoRA was not tested with trees", "drop --enable-lora")
    if setup.sampling_mask:
        yield Refusal("sampling masks are told of chains alone", "drop --return-sampling-mask")
    if setup.kv_connector:
        yield Refusal("KV connectors were not tested with trees", "drop --kv-transfer-config")


def _of_model(setup: TreeSetup) -> Iterator[Refusal]:
    without = "serve this model without draft_tree"
    if setup.multimodal:
        yield Refusal("models with images or M-RoPE have positions of their own", without)
    if setup.hybrid:
        yield Refusal("state-space layers take rows in their order, not by depth", without)
    if setup.mla:
        yield Refusal("MLA has no attention with a tree mask here", without)


def room_of_step(settings: Settings, setup: TreeSetup) -> int:
    """Rows that staging, logits and a step hold."""
    room = [setup.max_tokens]
    if setup.draft_bytes:
        room.append(settings.max_staging_bytes // setup.draft_bytes)
    if setup.logit_bytes:
        room.append(MAX_LOGIT_BYTES // setup.logit_bytes)
    return min(room)


def _of_memory(settings: Settings, setup: TreeSetup) -> Iterator[Refusal]:
    requests, each = setup.max_requests, 1 + setup.num_drafts
    if settings.draft_tree == "auto":  # larger trees and batches only where they fit
        requests, each = 1, ARM_ROWS[0]
    rows = requests * each
    staged = rows * setup.draft_bytes
    if staged > settings.max_staging_bytes:
        yield Refusal(
            f"drafts of {requests} requests take {staged} bytes, and max_staging_bytes is "
            f"{settings.max_staging_bytes}",
            f"raise max_staging_bytes, or {_SHORTER}",
        )
    logits = rows * setup.logit_bytes
    if logits > MAX_LOGIT_BYTES:
        yield Refusal(
            f"logits of {rows} rows take {logits} bytes, more than {MAX_LOGIT_BYTES}",
            _SHORTER,
        )
    if rows > setup.max_tokens:
        yield Refusal(
            f"{rows} rows of {requests} requests do not fit in a step of {setup.max_tokens} tokens",
            f"raise --max-num-batched-tokens, or {_SHORTER}",
        )
