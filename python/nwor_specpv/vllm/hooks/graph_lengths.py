"""CUDA graphs of model runner V2 for every number of drafts that our schedulers may choose.

vLLM lists the batches of its graphs for one number of drafts. Ours verify no drafts, few or all of
them: see `specpv.lengths` and `tree.shape`. A head drafts single rows, and keeps vLLM's own list
for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nwor_specpv.errors import logger
from nwor_specpv.vllm import registry, versions

from .wrapping import replace


def install() -> str | None:
    """Replaces the method that makes the list, once; the problem, if it is not as expected."""

    def offering(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def list_graphs(manager: Any) -> None:
            found = registry.find_engine(manager.vllm_config)
            if found is None or not found.draft_lengths or manager.decode_query_len == 1:
                return original(manager)
            with versions.adapter.offered(manager.vllm_config, found.draft_lengths):
                return original(manager)

        return list_graphs

    return replace(versions.adapter.list_graphs, offering)


def offer_larger_graphs(manager: Any) -> None:
    """Lets a batch be padded to any larger graph of its own number of rows.

    vLLM looks at the graphs of the next larger number of tokens only. With several numbers of rows
    that graph is often another kind's, and the step would run without a graph. Graphs of batches
    whose requests have different numbers of rows come last: they are not full ones.
    """
    if manager is None:
        return
    try:
        _offer_larger_graphs(manager)
    except Exception as error:  # vLLM's own names: without them, steps run without graphs
        logger.warning(
            "nwor_specpv: could not offer CUDA graphs for all draft lengths; some steps run "
            "without graphs: %s",
            error,
        )


def _offer_larger_graphs(manager: Any) -> None:
    found = {desc for descs in manager._candidates.values() for desc in descs}
    ordered = sorted(found, key=lambda desc: (desc.uniform_token_count is None, desc.num_tokens))
    for tokens, loras in list(manager._candidates):
        manager._candidates[tokens, loras] = [
            desc for desc in ordered if desc.num_tokens >= tokens and desc.num_active_loras == loras
        ]
