"""What an engine has published to its prefix cache, request by request."""

from __future__ import annotations

from typing import Any

from support.installed import PAGE


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def watch_requests(llm: Any) -> list[Any]:
    """The scheduler's own requests, in the order they come."""
    scheduler, found = scheduler_of(llm), []
    add = scheduler.add_request

    def watched(request: Any) -> None:
        found.append(request)
        add(request)

    scheduler.add_request = watched
    return found


def count_published_blocks(llm: Any, requests: list[Any], full_tokens: int) -> tuple[int, int]:
    """Blocks that can be found, and how many of them no request may have published: they are
    neither of a prompt nor within the first `full_tokens` tokens."""
    from vllm.v1.core.kv_cache_utils import get_block_hash

    pool = scheduler_of(llm).kv_cache_manager.block_pool
    found = {get_block_hash(b.block_hash) for b in pool.blocks if b.block_hash is not None}
    allowed = {
        block
        for request in requests
        for block in request.block_hashes[: max(full_tokens, request.num_prompt_tokens) // PAGE]
    }
    return len(found), len(found - allowed)
