"""Model runner V2: whether anything but confirmed tokens is in summaries or prefix hashes.

What is confirmed is known from outside: the texts that plain vLLM writes. vLLM is not imported at
the top: `triton_cpu.py` prepares its imports.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

_SHOWN = 5  # problems that are told


class ConfirmedTokensWatch:
    """Watches an engine whose requests have the given prompts and will have these whole texts."""

    def __init__(self, llm: Any, runner: Any, prompts: list[Any], texts: list[Any]) -> None:
        self._llm, self._runner = llm, runner
        self._texts = {
            tuple(prompt): list(text) for prompt, text in zip(prompts, texts, strict=True)
        }
        self._problems: list[str] = []
        self._counts = dict.fromkeys(("looks", "after_rejections", "blocks", "generated"), 0)
        self._published: list[tuple[int, int]] = []
        self._watch_proposals()
        self._watch_pool()

    def report(self) -> dict[str, Any]:
        """How much was looked at, and what was found wrong."""
        hashes, known = self._hashes(), self._known_hashes()
        prompts = sum(len(prompt) // self._page for prompt in self._texts)
        return self._counts | {
            "problems": self._problems[:_SHOWN],
            "published": len(self._published),
            "published_early": sum(tokens > known for tokens, known in self._published),
            "hashes": len(hashes),
            "hashes_of_prompts": prompts,
            "hashes_of_other_tokens": len(hashes - known),
        }

    # ---- summaries ------------------------------------------------------------------------------

    def _watch_proposals(self) -> None:
        speculator = self._runner.speculator
        draft = speculator._draft_by_passes

        def watched(batch: Any, passes: int, sampled: Any, rejected: Any, last: Any) -> None:
            draft(batch, passes, sampled, rejected, last)
            lens = batch.seq_lens[: batch.num_reqs] - rejected[: batch.num_reqs]
            roots = last[batch.idx_mapping].view(-1).tolist()
            for b, name in enumerate(batch.req_ids):
                row = speculator._rows.get(name)
                if row is not None and sampled[b] > 0:
                    self._counts["after_rejections"] += int(rejected[b] > 0)
                    self._look(name, b, row, int(lens[b]), roots[b])

        speculator._draft_by_passes = watched

    def _look(self, name: str, b: int, row: int, length: int, root: int) -> None:
        """A request with a view after a proposal: `length` tokens are cached, `root` follows."""
        speculator = self._runner.speculator
        store, table = speculator._loop.store, speculator._table(b + 1)[b]
        prompt = self._prompt(name)
        text = self._texts[prompt]
        self._counts["looks"] += 1
        if text[length] != root:
            self._problems.append(f"{name}: {length} tokens are not what was confirmed")
        sink, size = store.budget.sink_blocks, store.budget.block_size
        done, anchor = int(store._done[row]), int(store.anchors[row])
        if done > max(0, anchor // size - sink) or anchor > length:
            self._problems.append(
                f"{name}: {done} blocks of {anchor} tokens, of {length} confirmed"
            )
        blocks, of_page = torch.arange(sink, sink + done), store.page_size // size
        pages, parts = table[blocks // of_page].long(), blocks % of_page
        for layer, cache in enumerate(store.key_caches):
            keys = cache.unflatten(1, (of_page, size))[pages, parts]
            for kept, wanted in (
                (store.kmax[layer, pages, parts], keys.amax(1)),
                (store.kmin[layer, pages, parts], keys.amin(1)),
            ):
                if not torch.equal(kept, wanted):
                    self._problems.append(f"{name}: layer {layer}, other keys at {length} tokens")
        self._counts["blocks"] += done  # none: it has not been longer than a view yet
        self._counts["generated"] += max(0, sink + done - len(prompt) // size)

    def _prompt(self, name: str) -> tuple[int, ...]:
        states = self._runner.req_states
        index = states.req_id_to_index[name]
        length = int(states.prompt_len.np[index])
        return tuple(states.all_token_ids.gpu[index, :length].tolist())

    # ---- prefix hashes --------------------------------------------------------------------------

    @property
    def _pool(self) -> Any:
        core = self._llm.llm_engine.engine_core.engine_core
        return core.scheduler.kv_cache_manager.block_pool

    @property
    def _page(self) -> int:
        return self._pool.hash_block_size

    def _watch_pool(self) -> None:
        """Of every call that publishes blocks: tokens in them, tokens that the request has."""
        pool = self._pool
        publish = pool.cache_full_blocks
        signature = inspect.signature(publish)

        def watched(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            tokens = given["num_full_blocks"] * given["block_size"]
            self._published.append((tokens, given["request"].num_tokens))
            publish(*args, **kwargs)

        pool.cache_full_blocks = watched

    def _hashes(self) -> set[bytes]:
        """Those that are published now."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        return {get_block_hash(key) for key in self._pool.cached_block_hash_to_block._cache}

    def _known_hashes(self) -> set[bytes]:
        """Of whole blocks of the texts, by vLLM's own function."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        config = self._llm.llm_engine.vllm_config.cache_config
        function, found = get_hash_fn_by_name(config.prefix_caching_hash_algo), set()
        for text in self._texts.values():
            parent = None
            for end in range(self._page, len(text) + 1, self._page):
                parent = hash_block_tokens(function, parent, text[end - self._page : end])
                found.add(parent)
        return found
