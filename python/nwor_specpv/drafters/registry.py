"""Drafters by name. The names are those of `nwor_specpv.methods`.

drafter = make_drafter("eagle3", target=model)
register_drafter("mine", lambda target, **options: MyDrafter(target), summary="my own")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nwor_specpv.errors import NworError
from nwor_specpv.methods import (
    Method,
    get_method,
    method_names,
    register_method,
    unknown_name,
)

from .base import Drafter

Factory = Callable[..., Drafter]


def register_drafter(
    name: str,
    factory: Factory,
    *,
    summary: str = "registered by its user",
    replace: bool = False,
    **needs: Any,
) -> Method:
    """Adds a drafter for `make_drafter` and for hosts that take a name.

    `factory(target=.., **options)` makes it; `needs` are further fields of `Method`.
    """
    if not callable(factory):
        raise NworError(f"factory: got {type(factory).__name__}, expected a callable")
    made = Method(name, summary, factory=factory, **{"proposes": "tree", **needs})
    return register_method(made, replace=replace)


def drafter_names() -> tuple[str, ...]:
    """What `make_drafter` takes: built-in drafters first, then registered ones."""
    return tuple(
        name for name in method_names() if name in _BUILT_IN or get_method(name).factory is not None
    )


def make_drafter(name: str, target: Any = None, **options: Any) -> Drafter:
    """The drafter of that name; an unknown one is an error with the nearest name there is.

    `target` is the host's model, for drafters that share its matrices.
    """
    if name not in method_names():
        raise unknown_name("drafter", name, drafter_names())
    method = get_method(name)
    factory = method.factory or _BUILT_IN.get(name)
    if factory is None:
        needs = " and ".join(method.needs()) or "nothing"
        raise NworError(
            f"drafter: got {name!r}, which needs {needs} and is made by its host; expected one of "
            f"{', '.join(drafter_names())}, or a Drafter"
        )
    try:
        drafter = factory(target=target, **options)
    except TypeError as error:
        raise NworError(f"drafter {name!r}: {error}") from error
    if not isinstance(drafter, Drafter):
        raise NworError(f"drafter {name!r}: got {type(drafter).__name__}, expected a Drafter")
    return drafter


def _ngram(target: Any = None, **options: Any) -> Drafter:
    from .ngram import NgramDrafter

    del target
    return NgramDrafter(**options)


def _eagle3(target: Any = None, **options: Any) -> Drafter:
    from .eagle3 import Eagle3Drafter

    if target is None:
        raise NworError("target: got None, expected the model that the eagle3 head was trained for")
    return Eagle3Drafter.for_target(target, **options)


_BUILT_IN: dict[str, Factory] = {"ngram": _ngram, "eagle3": _eagle3}
