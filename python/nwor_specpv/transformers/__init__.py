"""Hosts on Hugging Face transformers. Only this folder imports transformers."""

from .cache import StaticKVCache, VirtualKVCache

__all__ = ["StaticKVCache", "VirtualKVCache"]
