"""Settings of one engine: `--additional-config '{"nwor_specpv": {...}}'`, then the environment."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from nwor_specpv.config import Settings, load_config, variable_of
from nwor_specpv.errors import NworError

KEY = "nwor_specpv"
_MODE = "specpv_mode"


def read_settings(additional_config: Any, env: Mapping[str, str] = os.environ) -> Settings:
    """What the user has said, in vLLM's additional config, where other packages may have keys of
    their own, and in the environment."""
    if not isinstance(additional_config, Mapping):
        return _load(None, env)
    if KEY not in additional_config:
        for other in additional_config:
            if difflib.get_close_matches(str(other).lower(), [KEY], cutoff=0.7):
                raise NworError(f"additional_config: unknown key {other!r}; write {KEY!r}")
        return _load(None, env)
    return _load(additional_config[KEY], env)


def _load(mapping: Any, env: Mapping[str, str]) -> Settings:
    """As `load_config`, but the default mode is `lossless`: vLLM feeds no token twice, so mode
    `rectify` cannot run there."""
    settings = load_config(mapping, env=env)
    said = isinstance(mapping, Mapping) and _MODE in mapping
    if said or variable_of(_MODE) in env:
        return settings
    return dataclasses.replace(settings, specpv_mode="lossless")
