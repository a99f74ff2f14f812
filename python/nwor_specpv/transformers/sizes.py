"""Sizes and windows of K/V, from a decoder's configuration."""

from __future__ import annotations

import sys
from typing import Any

from nwor_specpv import NworError

# One cache serves all layers, so these must be the same in all.
_ALIKE = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window")
_MAKES_MASKS = "create_sliding_window_causal_mask"


def text_config(config: Any) -> Any:
    """The decoder's configuration; raises if its layers differ in sizes of the cache."""
    text = config.get_text_config(decoder=True)
    for name in _ALIKE:
        try:
            getattr(text, name, None)
        except RuntimeError:  # transformers raises it when layers differ
            raise NworError(
                f"model: got layers of different {name}, expected the same in all"
            ) from None
    return text


def kv_sizes(text: Any) -> tuple[int, int, int]:
    """Layers, KV heads and channels of a head."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, heads, dim


def window_of(text: Any, layer: int) -> int:
    """The sliding window of a layer; 0: none."""
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return 0
    if getattr(text, "use_sliding_window", True) is False:
        return 0
    return getattr(text, "sliding_window", None) or 0


def any_window(text: Any) -> int:
    """The largest sliding window of the layers; 0: none."""
    return max(window_of(text, layer) for layer in range(text.num_hidden_layers))


def masks_windows(decoder: Any) -> bool:
    """Whether a model's own masks have windows.

    Without them transformers ignores the window in prompts and applies it in decoding, so tokens
    depend on the pieces in which they were run.
    """
    files = (sys.modules.get(kind.__module__) for kind in type(decoder).__mro__)
    return any(hasattr(file, _MAKES_MASKS) for file in files)
