"""Which model runner vLLM takes for `ngram_gpu`: V2 in mode `lossless`, V1 otherwise.

vLLM 0.26 keeps a list of what V2 does not support, and `ngram_gpu` is on it because V2 has no such
drafter. In mode `lossless` ours stands in its place, so the entry is left out. Later versions have
this method on V2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nwor_specpv.vllm import versions

from .speculators import drafts_without_head
from .wrapping import replace


def install() -> str | None:
    """Wraps the method that lists what V2 lacks; the problem, if it is not as expected."""

    def shorter(original: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
        def unsupported(config: Any) -> list[str]:
            found = original(config)
            if not drafts_without_head(config):
                return found
            return [feature for feature in found if feature != versions.adapter.ngram_on_v2]

        return unsupported

    listing = versions.adapter.unsupported_by_v2
    return replace(listing, shorter) if listing is not None else None
