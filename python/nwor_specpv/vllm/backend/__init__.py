"""Attention backends for vLLM: their classes, metadata and layers."""
