"""Hosts on Hugging Face transformers. Only this folder imports transformers."""

from .requirement import check_transformers

check_transformers()

from .cache import StaticKVCache, VirtualKVCache  # noqa: E402 (they import transformers)
from .generate import Generation, Generator  # noqa: E402
from .loading import load_model  # noqa: E402
from .stats import Stats  # noqa: E402

__all__ = ["Generation", "Generator", "StaticKVCache", "Stats", "VirtualKVCache", "load_model"]
