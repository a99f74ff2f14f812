"""Memory of views, which vLLM's caches leave free for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nwor_specpv.config import Settings
from nwor_specpv.errors import logger

from .lengths import head_drafts
from .rules import REFRESH


@dataclass(frozen=True)
class ViewMemory:
    """What views of an engine take on one rank."""

    per_cache_byte: float  # block summaries, which lie with the pages of the caches
    fixed: int  # K/V of drafts or kept queries, lists of blocks and scores: by --max-num-seqs

    def left_for_caches(self, available: int) -> int:
        """What caches may take of so many bytes."""
        left = max(0, int((available - self.fixed) / (1 + self.per_cache_byte)))
        logger.info(
            "nwor_specpv: views take %.2f GB of the %.2f GB that vLLM has for its caches",
            (available - left) / 1e9,
            available / 1e9,
        )
        return left


def describe(settings: Settings, vllm_config: Any) -> ViewMemory:
    """The memory of views of an engine that has them."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    batch, drafts = vllm_config.scheduler_config.max_num_seqs, vllm_config.num_speculative_tokens
    size, element = model.get_head_size(), model.dtype.itemsize
    lists = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel)
    if settings.specpv_mode == REFRESH:
        rows = 1 + drafts
        queries = model.get_num_layers(parallel) * model.get_num_attention_heads(parallel)
        kept = queries * size * element * batch * rows
    else:
        rows = 1 + head_drafts(settings, drafts)
        kept = 2 * lists * size * element * batch * (drafts + rows)
    budget = settings.specpv().budget(rows)
    if not budget.retrieval_blocks:
        return ViewMemory(0.0, kept + 4 * lists * batch * budget.max_view_blocks)
    ids = lists * (budget.retrieval_blocks + budget.max_view_blocks)
    scores = model.get_num_kv_heads(parallel) * (model.max_model_len // budget.block_size)
    cached = 1 if vllm_config.cache_config.cache_dtype.startswith("fp8") else element
    return ViewMemory(element / (budget.block_size * cached), kept + 4 * batch * (ids + scores))
