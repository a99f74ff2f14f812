"""Makes the drafter of a Generator from a name or an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nwor_specpv import NworError
from nwor_specpv.drafters import Drafter
from nwor_specpv.drafters import make_drafter as by_name
from nwor_specpv.drafters.registry import HOST_NAMES, drafter_names, unknown_drafter

from .loading import load_model
from .runner import ModelRunner


def check_drafter(drafter: str | Drafter, draft_model: Any) -> None:
    """Raises unless `drafter` and `draft_model` go together; needs no target."""
    if not isinstance(drafter, (str, Drafter)):
        raise NworError(f"drafter: got {type(drafter).__name__}, expected a name or a Drafter")
    if isinstance(drafter, str):
        valid = (*HOST_NAMES, *drafter_names())
        if drafter not in valid:
            raise unknown_drafter(drafter, valid)
    needed = isinstance(drafter, str) and drafter == "draft_model"
    if needed and draft_model is None:
        raise NworError("draft_model: got None, expected a smaller model with the same vocabulary")
    if not needed and draft_model is not None:
        raise NworError(
            f"draft_model: the drafter {drafter!r} uses none; leave it out, or use the drafter "
            "'draft_model'"
        )


def make_drafter(drafter: str | Drafter, runner: ModelRunner, draft_model: Any) -> Drafter | None:
    """Returns the drafter; None for "none". Raises if target and drafter do not fit."""
    check_drafter(drafter, draft_model)
    if isinstance(drafter, Drafter):
        made = drafter
    elif drafter == "none":
        made = None
    elif drafter == "draft_model":
        made = _model_drafter(draft_model, runner)
    else:
        made = by_name(drafter, target=runner.model)
    _check(made, runner)
    return made


def _model_drafter(model: Any, target: ModelRunner) -> Drafter:
    """A folder is loaded on the target's device and in its type."""
    from .draft_model import ModelDrafter

    try:
        if isinstance(model, (str, Path)):
            dtype = str(target.dtype).removeprefix("torch.")
            model, _ = load_model(model, dtype, target.device)
        return ModelDrafter(model)
    except NworError as error:  # says which of the two models
        raise NworError(f"draft_model: {error}") from None


def _check(drafter: Drafter | None, runner: ModelRunner) -> None:
    if drafter is None:
        return
    size = getattr(drafter, "vocab_size", None)
    if size is not None and size != runner.vocab_size:
        raise NworError(
            f"drafter: got a vocabulary of {size}, expected the target's {runner.vocab_size}; "
            "use a drafter made for this model"
        )
    wrong = [i for i in drafter.feature_layers if not 0 <= i < runner.num_layers]
    if wrong:
        raise NworError(
            f"drafter: asks for features of layer {wrong[0]}, expected 0 to "
            f"{runner.num_layers - 1}; use a drafter made for this model"
        )
