"""Where a text ends beside its length: tokens and strings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nwor_specpv import NworError

from .arguments import as_integer, as_python


def read_stop(stop: Any, tokenizer: Any, vocabulary: int) -> tuple[set[int], tuple[str, ...]]:
    """Ids and strings of the argument `stop`: one of either, or several."""
    given = as_python(stop)
    if given is None:
        return set(), ()
    several = isinstance(given, Iterable) and not isinstance(given, str)
    strings, ids = [], set()
    for one in given if several else [given]:
        number = as_integer(one)
        if isinstance(one, str) and one:
            strings.append(one)
        elif number is not None and 0 <= number < vocabulary:
            ids.add(number)
        else:
            raise NworError(
                f"stop: got {one!r}, expected strings that are not empty, or ids from 0 to "
                f"{vocabulary - 1}"
            )
    if strings and tokenizer is None:
        raise NworError(
            f"stop: got {strings[0]!r} without a tokenizer, expected token ids, or "
            "Generator(model, tokenizer)"
        )
    return ids, tuple(strings)


class StopStrings:
    """Finds the token that completes one of some strings."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Any) -> None:
        self._strings, self._tokenizer = strings, tokenizer
        # A token has a byte or more, a special token none at times.
        self._most = max((len(one.encode()) for one in strings), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, before: list[int], new: list[int]) -> int | None:
        """How many of the new tokens it takes, of a text that had none of the strings before."""
        window = before[-self._most :]
        if not self._within(window + new):
            return None
        counts = range(1, len(new) + 1)
        return next((count for count in counts if self._within(window + new[:count])), len(new))

    def _within(self, tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(one in text for one in self._strings)


def cut_text(text: str, strings: tuple[str, ...]) -> str:
    """The text before the first of the strings."""
    found = [at for one in strings if (at := text.find(one)) >= 0]
    return text[: min(found)] if found else text
