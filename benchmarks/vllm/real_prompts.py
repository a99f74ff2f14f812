"""Prompts of real text for real.py, of an exact number of tokens, all of them different.

* `continue`: a window of the text, which the model continues.
* `question`: a fact, a window of the text, and at the end a question about the fact.
* `edit`: source files of Python's standard library; the first one is to be printed again with a
  function or a class renamed.

The text is the beginning of War and Peace, which ships with the package, and then Python's language
reference, which every Python has; or files that the user names.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import platform
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("continue", "question", "edit")
LEAST_SOURCE = 4000  # characters; shorter source files are not worth an edit
_SOURCES_AT_ONCE = 64

_MARK = "{the text}"
_NAMES = ("Arkady", "Bruno", "Cassius", "Dobry", "Emil", "Falk", "Griffin", "Hektor")
_VILLAGES = ("Sosnovka", "Birkendorf", "Altamura", "Kirkwall", "Moreton", "Vesoul", "Lindby")
_TRADES = ("miller", "baker", "doctor", "smith", "teacher", "gardener")
_COLOURS = ("green", "yellow", "grey", "red", "blue")
_FACT = (
    "The name of the horse is {name}, it is {age} years old and it came from the village of "
    "{village}. It belongs to the {trade} and pulls a {colour} cart. Keep this in mind while you "
    "read.\n\n"
)
_QUESTION = (
    "\n\nWrite a long letter to the owner of the horse that was named at the very beginning. Say "
    "its name, its age, its village, its owner's trade and the colour of its cart. Then retell "
    "what the text after it was about."
)
_EDIT = (
    "\n\nRename the {what} `{old}` of {file} to `{new}`. Print {file} again from its first line "
    "on, with this change and no other."
)


@dataclass(frozen=True)
class Text:
    """What `continue` and `question` take their windows from."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(files: Sequence[str] = ()) -> Text:
    """The named files in order; without files the default text."""
    if files:
        names = ", ".join(Path(file).name for file in files)
        return Text(names, "\n\n".join(Path(file).read_text(encoding="utf-8") for file in files))
    from pydoc_data.topics import topics

    from nwor_specpv.cli.demo.texts import BOOK

    reference = "\n\n".join(topics[name] for name in sorted(topics))
    name = f"War and Peace (beginning), language reference of Python {platform.python_version()}"
    return Text(name, BOOK.read_text(encoding="utf-8") + "\n\n" + reference)


@dataclass(frozen=True)
class Source:
    """A source file of the standard library and what to rename in it."""

    name: str
    content: str
    what: str  # function or class
    old: str


@functools.cache
def library_sources() -> tuple[Source, ...]:
    """Files with a function or class at their top level, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")]):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "dist-packages/", "test/", "idlelib/", "lib2to3/")):
            continue
        try:
            content = path.read_text(encoding="utf-8")
            tree = ast.parse(content)
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        node = next((n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)), None)
        if node is not None and len(content) >= LEAST_SOURCE:
            what = "class" if isinstance(node, ast.ClassDef) else "function"
            found.append(Source(name, content, what, node.name))
    return tuple(found)


class Prompts:
    """Makes prompts with one model's tokenizer. Thread-safety: none."""

    def __init__(self, tokenizer: Any, text: Text) -> None:
        self._tokenizer = tokenizer
        self._text = self._encode(text.content)
        self._before, self._after = self._turn()
        self._sources: dict[int, list[int]] = {}
        self.text_tokens = len(self._text)

    def make(self, kind: str, requests: int, length: int) -> list[list[int]]:
        """Prompts of `length` tokens each."""
        makers = {"continue": self._continue, "question": self._ask, "edit": self._edit}
        made = []
        for index in range(requests):
            head, tail = makers[kind](index)
            room = length - len(head) - len(tail)
            if room < 1:
                raise ValueError(
                    f"a prompt of {length} tokens is too short for {kind!r}: "
                    f"it needs {len(head) + len(tail) + 1}"
                )
            if kind == "edit":
                body = self._files(index, room)
            else:
                body = self._window(index * len(self._text) // requests, room)
            made.append(head + body + tail)
        return made

    def windows(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Prompts of these lengths, each from a place of its own, drawn by the seed."""
        first, _ = self._continue(0)
        chance = random.Random(seed)
        starts = [chance.randrange(len(self._text)) for _ in lengths]
        return [
            first + self._window(start, max(1, length - len(first)))
            for start, length in zip(starts, lengths, strict=True)
        ]

    def _window(self, start: int, room: int) -> list[int]:
        """The text from a place on; where it ends it begins again."""
        found = self._text[start : start + room]
        while len(found) < room:
            found += self._text[: room - len(found)]
        return found

    def _files(self, index: int, room: int) -> list[int]:
        """Whole files from one of them on, the last one cut."""
        sources, body = library_sources(), []
        for number in itertools.count(index):
            body += self._encoded(number % len(sources))
            if len(body) >= room:
                break
        return body[:room]

    def _encoded(self, number: int) -> list[int]:
        """One file's tokens. Many files are encoded at once, which uses all cores."""
        if number not in self._sources:
            numbers = range(number, min(number + _SOURCES_AT_ONCE, len(library_sources())))
            sources = [library_sources()[index] for index in numbers]
            texts = [f"# File: {source.name}\n{source.content}\n\n" for source in sources]
            encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            self._sources |= zip(numbers, encoded, strict=True)
        return self._sources[number]

    def _continue(self, index: int) -> tuple[list[int], list[int]]:
        tokenizer = self._tokenizer
        first = tokenizer.encode("a")[:1]  # of the text alone, or what begins every text
        return (first if first == [tokenizer.bos_token_id] else []), []

    def _ask(self, index: int) -> tuple[list[int], list[int]]:
        rng = random.Random(index)
        fact = _FACT.format(
            name=rng.choice(_NAMES),
            age=rng.randrange(3, 25),
            village=rng.choice(_VILLAGES),
            trade=rng.choice(_TRADES),
            colour=rng.choice(_COLOURS),
        )
        return self._encode(self._before + fact), self._encode(_QUESTION + self._after)

    def _edit(self, index: int) -> tuple[list[int], list[int]]:
        sources = library_sources()
        source = sources[index % len(sources)]
        asked = _EDIT.format(
            what=source.what, old=source.old, new=f"{source.old}_renamed", file=source.name
        )
        return self._encode(self._before), self._encode(asked + self._after)

    def _turn(self) -> tuple[str, str]:
        """What stands before and after a user's message."""
        tokenizer = self._tokenizer
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": _MARK}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            before, _, after = text.partition(_MARK)
            return before, after
        if "<|im_start|>" in tokenizer.get_vocab():
            return "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        return "", "\n\n"

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []
