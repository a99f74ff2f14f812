"""Settings of one engine: `--additional-config '{"nwor_specpv": {...}}'`, then the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from nwor_specpv.config import Settings, load_config
from nwor_specpv.errors import NworError

KEY = "nwor_specpv"


def read_settings(additional_config: Any, env: Mapping[str, str] = os.environ) -> Settings:
    """The settings in vLLM's additional config, where other packages may have keys of their own."""
    if not isinstance(additional_config, Mapping):
        return load_config(env=env)
    if KEY not in additional_config:
        for other in additional_config:
            if difflib.get_close_matches(str(other).lower(), [KEY], cutoff=0.7):
                raise NworError(f"additional_config: got key {other!r}, expected {KEY!r}")
        return load_config(env=env)
    return load_config(additional_config[KEY], env=env)
