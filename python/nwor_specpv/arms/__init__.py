"""Chooses how steps are made by what they took and yielded, with plain steps among the choices."""

from .choice import ArmChoice, Choice, Pace
from .estimates import PLAIN, Arm, draft_lengths, make_arms

__all__ = ["PLAIN", "Arm", "ArmChoice", "Choice", "Pace", "draft_lengths", "make_arms"]
