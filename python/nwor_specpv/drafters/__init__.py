"""Drafters propose the tokens that the target verifies; `make_drafter` finds them by name."""

from .base import Drafter, TreeConfig
from .registry import make_drafter, register_drafter

__all__ = ["Drafter", "TreeConfig", "make_drafter", "register_drafter"]
