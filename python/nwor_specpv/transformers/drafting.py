"""Drafters by name, as a Generator takes them."""

from __future__ import annotations

from typing import Any

from nwor_specpv import NworError
from nwor_specpv.drafters import Drafter
from nwor_specpv.drafters import make_drafter as by_name

from .runner import ModelRunner


def make_drafter(drafter: str | Drafter, runner: ModelRunner, draft_model: Any) -> Drafter | None:
    """None for "none". Checks that target and drafter have one vocabulary."""
    if isinstance(drafter, str) and drafter == "none":
        made = None
    elif isinstance(drafter, str) and drafter == "draft_model":
        from .draft_model import ModelDrafter

        if draft_model is None:
            raise NworError(
                "draft_model: got none, expected a smaller model with the same vocabulary"
            )
        made = ModelDrafter(draft_model)
    elif isinstance(drafter, str):
        made = by_name(drafter, target=runner.model)
    elif isinstance(drafter, Drafter):
        made = drafter
    else:
        raise NworError(f"drafter: got {type(drafter).__name__}, expected a name or a Drafter")
    _check(made, runner)
    return made


def _check(drafter: Drafter | None, runner: ModelRunner) -> None:
    if drafter is None:
        return
    size = getattr(drafter, "vocab_size", None)
    if size is not None and size != runner.vocab_size:
        raise NworError(
            f"drafter: got a vocabulary of {size}, expected {runner.vocab_size} as the target; "
            "use a drafter made for this model"
        )
    wrong = [i for i in drafter.feature_layers if not 0 <= i < runner.num_layers]
    if wrong:
        raise NworError(
            f"drafter: asks for features of layer {wrong[0]}, expected 0 to "
            f"{runner.num_layers - 1}: is it a drafter of this model?"
        )
