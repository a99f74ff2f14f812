"""Encoded prompts of a training, in a file: written with the target's tokenizer, read without."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nwor_specpv._files import write_whole
from nwor_specpv.errors import NworError

from . import prompts
from .chat_format import ChatFormat, read_chat_format
from .corpus import WritingStyle


def read_prompts(
    path: Path, vocabulary: int
) -> tuple[list[prompts.Opening], list[prompts.Opening]]:
    """Reads the openings and held-out prompts that `write_prompts` wrote; needs no tokenizer."""
    data = _read_prompt_file(path)
    try:
        parts = {name: list(data[name]) for name in ("openings", "held_out")}
    except (KeyError, TypeError) as error:
        raise NworError(f"{path}: not a file of prompts: {error}") from None
    for name, part in parts.items():
        if not part:
            raise NworError(f"{path}: {name}: got none, expected one or more")
        for place, entry in enumerate(part):
            try:
                part[place] = prompts.read_opening(entry, vocabulary)
            except NworError as error:
                raise NworError(f"{path}: {name}[{place}]: {error}") from None
    return parts["openings"], parts["held_out"]


def read_stop_tokens(path: Path, vocabulary: int) -> tuple[int, ...]:
    """The tokens that end a text, of a file that `write_prompts` wrote: the end of a turn last."""
    tokens = _read_prompt_file(path).get("stop_tokens", list(WritingStyle.stop_tokens))
    right = isinstance(tokens, list) and tokens
    if not right or not all(type(one) is int and 0 <= one < vocabulary for one in tokens):
        raise NworError(
            f"{path}: stop_tokens: got {tokens!r}, expected ids from 0 to {vocabulary - 1}"
        )
    return tuple(tokens)


def _read_prompt_file(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NworError(f"{path}: not a file of prompts: {error}") from None
    if not isinstance(data, dict):
        raise NworError(f"{path}: not a file of prompts: got {type(data).__name__}")
    return data


def prompt_encoder(folder: Path) -> prompts.Encode:
    """Returns a function from text to ids, with the tokenizer in `folder`."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise NworError(
            f"{folder}: its tokenizer needs the package tokenizers: run `pip install tokenizers`"
        ) from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NworError(f"{folder}: got no tokenizer.json, expected a Hugging Face model folder")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def write_prompts(folder: Path, path: Path, count: int = 16384) -> None:
    """Encodes the prompts with the tokenizer in `folder` and writes them to `path`.

    For every eight of `count` openings it adds five everyday questions.
    """
    encode, chat = prompt_encoder(folder), read_chat_format(folder)
    begun = [
        *prompts.openings(encode, count, chat=chat),
        *prompts.asked(encode, count * 5 // 8, chat=chat),
    ]
    parts = {"openings": begun, "held_out": prompts.held_out(encode, chat)}
    data: dict[str, Any] = {name: [asdict(entry) for entry in part] for name, part in parts.items()}
    data["stop_tokens"] = stop_tokens(folder, encode, chat)
    write_whole(path, json.dumps(data))


def stop_tokens(folder: Path, encode: prompts.Encode, chat: ChatFormat) -> list[int]:
    """The tokens that end a text of the model in `folder`, the end of a turn last."""
    last, known = encode(chat.answer)[0], encode("<|endoftext|>")
    if [last] == known and "<|endoftext|>" not in chat.answer:  # both are what it does not know
        raise NworError(
            f"{folder}: got a tokenizer without a token that ends a turn, expected one for the "
            f"beginning of {chat.answer!r}"
        )
    ends = set(known) if len(known) == 1 else set()
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        try:
            config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            given = config.get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise NworError(f"{file}: cannot be read: {error}") from None
        ends |= {one for one in (given if isinstance(given, list) else [given]) if one is not None}
    return [*sorted(ends - {last}), last]
