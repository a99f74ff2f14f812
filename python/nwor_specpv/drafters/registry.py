"""Drafters by name.

drafter = make_drafter("eagle3", target=model)
register_drafter("mine", lambda target, **options: MyDrafter(target))
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from nwor_specpv.errors import NworError

from .base import Drafter

# factory(target=.., **options): `target` is the host's model.
Factory = Callable[..., Drafter]

# Names that a host handles itself: plain decoding, and a smaller model that the host loads.
HOST_NAMES = ("none", "draft_model")

_registered: dict[str, Factory] = {}


def register_drafter(name: str, factory: Factory, *, replace: bool = False) -> None:
    """Adds a drafter for `make_drafter` and for hosts that take a name.

    `factory(target=.., **options)` makes it. A name that is taken needs `replace`; the names of
    built-in drafters stay theirs.
    """
    if not isinstance(name, str) or not name or name != name.strip().lower():
        raise NworError(f"name: got {name!r}, expected a word in lower case")
    if not callable(factory):
        raise NworError(f"factory: got {type(factory).__name__}, expected a callable")
    if name in _BUILT_IN or name in HOST_NAMES:
        raise NworError(f"name: got {name!r}, which is built in; expected another name")
    if name in _registered and not replace:
        raise NworError(
            f"name: got {name!r}, which is registered; expected another, or replace=True"
        )
    _registered[name] = factory


def drafter_names() -> tuple[str, ...]:
    """What `make_drafter` takes: built-in drafters first, then registered ones."""
    return (*_BUILT_IN, *_registered)


def make_drafter(name: str, target: Any = None, **options: Any) -> Drafter:
    """Makes the drafter of that name; an unknown name is an error with the nearest one.

    `target` is the host's model, for drafters that share its matrices.
    """
    if name in HOST_NAMES:
        raise NworError(
            f"drafter: got {name!r}, which the host handles itself; expected one of "
            f"{', '.join(drafter_names())}, or a Drafter"
        )
    if name not in drafter_names():
        raise unknown_drafter(name, drafter_names())
    factory = _BUILT_IN.get(name) or _registered[name]
    try:
        drafter = factory(target=target, **options)
    except TypeError as error:
        raise NworError(f"drafter {name!r}: {error}") from error
    if not isinstance(drafter, Drafter):
        raise NworError(f"drafter {name!r}: got {type(drafter).__name__}, expected a Drafter")
    return drafter


def unknown_drafter(name: object, valid: Sequence[str]) -> NworError:
    """The error for a name that is not in `valid`, with the nearest name that is."""
    word = str(name).strip().lower()
    (nearest,) = difflib.get_close_matches(word, valid, n=1, cutoff=0.0)
    return NworError(
        f"drafter: got {name!r}, expected one of {', '.join(valid)}; the nearest is {nearest!r}"
    )


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
