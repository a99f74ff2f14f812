"""What of vLLM does not go together with staging yet: said at start, never found out in service.

`describe` turns a vLLM configuration into plain values, `refusals` judges them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import versions

# Caches that are not quantized, as vLLM names them.
_PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32", "half", "float")

# Quantised caches that we commit to and attend to.
FLOAT8 = ("fp8", "fp8_e4m3")

# KV connectors that were tried. What this one saves are blocks of tokens that are known when a step
# is planned. Those are in the cache: drafts that were accepted since the last step's end, the root
# as soon as its layer has run. With asynchronous scheduling a plan knows nothing of what the step
# under way emits. A connector that saved a step's drafts would find nothing there.
OFFLOADING = "OffloadingConnector"
CONNECTORS = frozenset({OFFLOADING})


def is_quantized(kv_cache_dtype: str) -> bool:
    """Whether a cache that vLLM names so is quantised."""
    return kv_cache_dtype not in _PLAIN_CACHES


@dataclass(frozen=True)
class Refusal:
    """Why staging stays off, and what to change for it to be on."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


@dataclass(frozen=True)
class Setup:
    """The parts of a vLLM configuration that matter here."""

    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    micro_batches: bool = False
    kv_connector: str | None = None
    offloads_answers: bool = False  # vLLM's offloading connector saves more than prompts
    mla: bool = False
    cascade_attention: bool = False
    kv_sharing_fast_prefill: bool = False
    writes_in_pieces: bool = False
    speculation: str | None = None  # the drafter's method, None: no speculation
    num_speculative_tokens: int = 0
    drafts_by_batch_size: tuple[int, ...] = ()  # numbers of drafts that vLLM chooses from
    drafter_shares_kv: bool = False
    adaptive_verification: bool = False  # vLLM gives drafts to requests on the device
    sharing_layers: int = 0  # layers of the model without K/V of their own
    attention_chunk: int = 0  # tokens that a layer sees at once, 0: no chunks
    bidirectional_images: bool = False
    answer_window: int = 0  # tokens that answers see beside the prompt, 0: all
    encoder: bool = False


def recovers(vllm_config: Any) -> bool:
    """Whether requests can be computed again after a fault: the executor hands outputs of vLLM's
    worker to the scheduler as they are."""
    return vllm_config.parallel_config.distributed_executor_backend in (None, "uni", "mp")


def describe(vllm_config: Any) -> Setup:
    """The set-up of a VllmConfig."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    transfer, speculative = vllm_config.kv_transfer_config, vllm_config.speculative_config
    return Setup(
        pipeline_parallel=parallel.pipeline_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        micro_batches=bool(parallel.use_ubatching),
        kv_connector=_connector(transfer),
        offloads_answers=transfer is not None
        and not transfer.kv_connector_extra_config.get("offload_prompt_only", True),
        mla=bool(model.use_mla),
        cascade_attention=not model.disable_cascade_attn,
        kv_sharing_fast_prefill=bool(vllm_config.cache_config.kv_sharing_fast_prefill),
        writes_in_pieces=_writes_in_pieces(vllm_config.compilation_config),
        speculation=speculative.method if speculative is not None else None,
        num_speculative_tokens=(
            (speculative.num_speculative_tokens or 0) if speculative is not None else 0
        ),
        drafts_by_batch_size=_drafts_by_batch_size(speculative),
        drafter_shares_kv=speculative is not None and speculative.use_gemma4_mtp(),
        adaptive_verification=bool(getattr(speculative, "enable_adaptive_verification", False)),
        sharing_layers=getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0,
        attention_chunk=model.attention_chunk_size or 0,
        bidirectional_images=bool(model.is_mm_prefix_lm),
        answer_window=model.rswa_window or 0,
        encoder=bool(model.is_encoder_decoder),
    )


def _connector(transfer: Any) -> str | None:
    """The name of the KV connector; that of another module's with the module's."""
    if transfer is None or transfer.kv_connector is None:
        return None
    return ".".join(filter(None, (transfer.kv_connector_module_path, transfer.kv_connector)))


def _drafts_by_batch_size(speculative: Any) -> tuple[int, ...]:
    """Of vLLM's dynamic speculative decoding: ranges of batch sizes, the drafts of each last."""
    ranges = speculative.num_speculative_tokens_per_batch_size if speculative is not None else None
    return tuple(sorted({drafts for _, _, drafts in ranges or ()}))


def _writes_in_pieces(compilation: Any) -> bool:
    """Whether writes of K/V may be in CUDA graphs that end at attention layers."""
    mode = compilation.cudagraph_mode
    if mode is None or mode.name in ("NONE", "FULL_DECODE_ONLY"):
        return False
    if os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1":
        return True
    pieces = compilation.is_attention_compiled_piecewise()
    return pieces and not compilation.splitting_ops_contain_kv_cache_update()


def refusals(setup: Setup) -> list[Refusal]:
    """Everything that keeps staging off; empty: it may be on."""
    return list(_refusals(setup))


def _refusals(setup: Setup) -> Iterator[Refusal]:
    if setup.pipeline_parallel > 1:
        yield Refusal(
            f"pipeline parallelism of {setup.pipeline_parallel} is not supported: earlier ranks "
            "learn too late which drafts were rejected",
            "use --pipeline-parallel-size 1 and tensor parallelism",
        )
    if setup.decode_context_parallel > 1 or setup.prefill_context_parallel > 1:
        yield Refusal(
            "context parallelism is not supported: a rank holds only some slots of a draft",
            "use --decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
        )
    if setup.micro_batches:
        yield Refusal(
            "micro-batches (dual batch overlap) are not supported: several are in flight at once",
            "drop --enable-dbo and --ubatch-size",
        )
    yield from _connector_refusals(setup)
    if setup.mla:
        yield Refusal(
            "MLA is not supported: the cache holds latents, not K and V",
            "serve this model without nwor_specpv",
        )
    if setup.cascade_attention:
        yield Refusal(
            "cascade attention is not supported: the shared prefix is computed elsewhere",
            "leave --disable-cascade-attn at its default",
        )
    if setup.writes_in_pieces:
        yield Refusal(
            "K/V writes within piecewise CUDA graphs are not supported: a replayed graph cannot "
            "tell which rows are drafts",
            "leave use_inductor_graph_partition and splitting_ops of --compilation-config, and "
            "VLLM_USE_BREAKABLE_CUDAGRAPH, at their defaults, or use cudagraph_mode "
            "FULL_DECODE_ONLY",
        )
    if setup.kv_sharing_fast_prefill:
        yield Refusal(
            "fast prefill with KV sharing is not supported: layers skip rows",
            "drop --kv-sharing-fast-prefill",
        )
    if setup.adaptive_verification:
        yield Refusal(
            "adaptive verification is not supported: the host does not know which rows are drafts",
            "drop enable_adaptive_verification from --speculative-config",
        )
    yield from _attention_refusals(setup)


def _connector_refusals(setup: Setup) -> Iterator[Refusal]:
    if setup.kv_connector is not None and setup.kv_connector not in CONNECTORS:
        yield Refusal(
            f"KV connector {setup.kv_connector} was not tried: one that saves all rows of a step "
            "would save drafts before they are committed",
            f"use {OFFLOADING}, or drop --kv-transfer-config",
        )
    saves_answers = setup.kv_connector == OFFLOADING and setup.offloads_answers
    if saves_answers and versions.adapter.offloads_last_token:
        yield Refusal(
            f"{OFFLOADING} of vLLM {versions.adapter.version} saves a block that ends with the "
            "last token of a request, whose K/V nobody has computed",
            "drop offload_prompt_only from kv_connector_extra_config, or install vLLM 0.32.0",
        )


def _attention_refusals(setup: Setup) -> Iterator[Refusal]:
    """Of models, and a drafter, whose layers see something else than all tokens before a row."""
    without = "serve this model without nwor_specpv"
    if setup.sharing_layers:
        yield Refusal(
            f"{setup.sharing_layers} layers attend to the K/V of other layers, where drafts are "
            "not written yet",
            without,
        )
    if setup.drafter_shares_kv:
        yield Refusal(
            "this drafter attends to the K/V of the model, where drafts are not written yet",
            "use another drafter",
        )
    if setup.attention_chunk:
        yield Refusal(
            f"attention in chunks of {setup.attention_chunk} tokens is not supported: vLLM makes "
            "several requests of one",
            without,
        )
    if setup.bidirectional_images:
        yield Refusal(
            "attention to both sides within images is not supported: rows that verify drafts see "
            "only what is before them",
            without,
        )
    if setup.answer_window:
        yield Refusal(
            f"answers see only the latest {setup.answer_window} tokens beside the prompt: rows "
            "that verify drafts would read pages that vLLM has freed",
            without,
        )
    if setup.encoder:
        yield Refusal(
            "encoder-decoder models are not supported: cross attention writes K/V, too", without
        )


def layer_problem(
    *,
    attn_type: str,
    alibi: bool,
    sinks: bool,
    kv_sharing_target: str | None,
    head_size: int,
    quantized_cache: bool,
) -> str | None:
    """Why one layer cannot be computed or staged by us, or None."""
    if attn_type != "decoder":
        return f"attention of type {attn_type}"
    if kv_sharing_target is not None:
        return f"no K/V of its own but that of {kv_sharing_target}"
    if alibi:
        return "ALiBi slopes"
    if sinks:
        return "attention sinks"
    if quantized_cache:
        return "a quantised KV cache"
    if head_size % 8 or head_size > 256:
        return f"a head size of {head_size}"
    return None
