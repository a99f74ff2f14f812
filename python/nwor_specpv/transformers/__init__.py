"""Hosts on Hugging Face transformers. Only this folder imports transformers."""

from .cache import StaticKVCache, VirtualKVCache
from .generate import Generation, Generator
from .loading import load_model
from .stats import Stats

__all__ = ["Generation", "Generator", "StaticKVCache", "Stats", "VirtualKVCache", "load_model"]
