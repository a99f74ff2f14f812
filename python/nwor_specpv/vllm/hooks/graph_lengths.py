"""CUDA graphs of model runner V2 for every number of drafts that steps may have in mode `lossless`.

vLLM lists the batches of its graphs for one number of drafts. Ours verify no drafts, few or all of
them: see `specpv.lengths`. A head drafts single rows, and keeps vLLM's own list for those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nwor_specpv.vllm import registry, versions

from .wrapping import replace


def install() -> str | None:
    """Replaces the method that makes the list, once; the problem, if it is not as expected."""

    def offering(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def list_graphs(manager: Any) -> None:
            found = registry.find_engine(manager.vllm_config)
            if found is None or found.lengths is None or manager.decode_query_len == 1:
                return original(manager)
            with versions.adapter.offered(manager.vllm_config, found.lengths.drafts):
                return original(manager)

        return list_graphs

    return replace(versions.adapter.list_graphs, offering)
