"""Drafters: who proposes the tokens that the target verifies. One interface, found by name."""

from .base import Drafter, TreeConfig

__all__ = ["Drafter", "TreeConfig"]
