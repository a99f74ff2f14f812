"""Settings of a model's `generation_config` that a Generator ignores."""

from __future__ import annotations

import reprlib
from typing import Any

from nwor_specpv.errors import logger

# Settings that change greedy tokens or where they end, with the value that changes nothing.
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": None,
    "num_beams": 1,
    "guidance_scale": None,
    "watermarking_config": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
}
_ALSO_NEUTRAL: dict[str, tuple] = {
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "min_new_tokens": (0,),
    "guidance_scale": (1,),
}


def ignored_settings(model: Any) -> dict[str, Any]:
    """The ignored settings that are set, by name."""
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in _NEUTRAL}
    return {
        name: value
        for name, value in found.items()
        if value not in (None, _NEUTRAL[name], *_ALSO_NEUTRAL.get(name, ()))
    }


def neutral(model: Any) -> dict[str, Any]:
    """Arguments with which transformers' generate ignores them too."""
    return {name: _NEUTRAL[name] for name in ignored_settings(model)}


def warn_ignored(model: Any) -> None:
    """Logs the ignored settings, if there are any."""
    found = ignored_settings(model)
    if found:
        settings = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in found.items())
        logger.warning("model: Generator ignores these settings of generation_config: %s", settings)
