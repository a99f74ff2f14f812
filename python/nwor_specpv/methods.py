"""Speculative methods by name, and what each needs of its host.

    method = get_method("eagle3")
    if method.hidden_states != "none": ...         # hosts ask before they start
    register_method(Method("mine", "my own drafter", proposes="chain"))

Importable without the native library.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import NworError

HIDDEN_STATES = ("none", "last", "several")
PROPOSALS = ("nothing", "chain", "tree")


@dataclass(frozen=True)
class Method:
    """What a method needs of its host, and what it gives; hosts ask before a run starts."""

    name: str
    summary: str
    draft_model: bool = False  # weights of a smaller model with the target's vocabulary
    draft_head: bool = False  # weights of a head trained on the target's hidden states
    hidden_states: str = "none"  # of the target: none, the last layer's, those of several layers
    proposes: str = "chain"  # nothing, a chain, a tree
    draft_probs: bool = False  # can tell the probabilities its drafts were drawn with
    # Makes the drafter; its arguments are the host's. None: the host has its own.
    factory: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip().lower():
            raise NworError(f"name: got {self.name!r}, expected a word in lower case")
        for field, value, valid in (
            ("hidden_states", self.hidden_states, HIDDEN_STATES),
            ("proposes", self.proposes, PROPOSALS),
        ):
            if value not in valid:
                raise NworError(f"{field}: got {value!r}, expected one of {', '.join(valid)}")

    @property
    def tree(self) -> bool:
        """Whether it proposes trees, not chains."""
        return self.proposes == "tree"

    def needs(self) -> tuple[str, ...]:
        """In words, for messages: ('a draft head', 'hidden states of several layers')."""
        words = []
        if self.draft_model:
            words.append("a draft model")
        if self.draft_head:
            words.append("a draft head")
        if self.hidden_states == "last":
            words.append("hidden states of the last layer")
        elif self.hidden_states == "several":
            words.append("hidden states of several layers")
        return tuple(words)


_BUILT_IN = (
    Method("none", "plain decoding, a token a step", proposes="nothing"),
    Method("ngram", "what followed the last tokens where they stood before", proposes="tree"),
    Method(
        "draft_model", "a smaller model of the same vocabulary", draft_model=True, draft_probs=True
    ),
    Method(
        "eagle",
        "a head that continues the target's last hidden states",
        draft_head=True,
        hidden_states="last",
        proposes="tree",
        draft_probs=True,
    ),
    Method(
        "eagle3",
        "a head over hidden states of low, middle and high layers",
        draft_head=True,
        hidden_states="several",
        proposes="tree",
        draft_probs=True,
    ),
    Method(
        "medusa-tree",
        "several heads, one for each position ahead, over a fixed tree",
        draft_head=True,
        hidden_states="last",
        proposes="tree",
    ),
)

_lock = threading.Lock()
_methods = {method.name: method for method in _BUILT_IN}


def register_method(method: Method, *, replace: bool = False) -> Method:
    """Adds a method for `get_method`. A name that is taken needs `replace`; built-in ones stay."""
    if not isinstance(method, Method):
        raise NworError(f"method: got {type(method).__name__}, expected a Method")
    with _lock:
        if any(method.name == built_in.name for built_in in _BUILT_IN):
            raise NworError(f"name: got {method.name!r}, which is built in; expected another name")
        if method.name in _methods and not replace:
            raise NworError(
                f"name: got {method.name!r}, which is registered; expected another, or replace=True"
            )
        _methods[method.name] = method
    return method


def unregister_method(name: str) -> None:
    """Takes a registered method away; built-in ones stay."""
    get_method(name)
    with _lock:
        if any(name == built_in.name for built_in in _BUILT_IN):
            raise NworError(f"name: got {name!r}, which is built in; expected a registered method")
        _methods.pop(name, None)


def get_method(name: str) -> Method:
    """The method of that name; an unknown one is an error with the nearest name there is."""
    found = _methods.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    raise unknown_name("method", name, method_names())


def unknown_name(what: str, name: object, valid: Sequence[str]) -> NworError:
    """The error for it, with the nearest name there is."""
    word = str(name).strip().lower()
    (nearest,) = difflib.get_close_matches(word, valid, n=1, cutoff=0.0)
    return NworError(
        f"{what}: got {name!r}, expected one of {', '.join(valid)}; the nearest is {nearest!r}"
    )


def method_names() -> tuple[str, ...]:
    """Built-in methods first, then registered ones in their order."""
    with _lock:
        return tuple(_methods)
