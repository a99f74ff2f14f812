"""Drafters: who proposes the tokens that the target verifies. One interface, found by name."""

from .base import Drafter, TreeConfig
from .registry import make_drafter, register_drafter

__all__ = ["Drafter", "TreeConfig", "make_drafter", "register_drafter"]
