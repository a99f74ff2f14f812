"""The bytes of single tokens, which joined give the text's UTF-8, also where a character has
several tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # a space in pieces of SentencePiece


def token_bytes_of(tokenizer: Any) -> Callable[[int], bytes] | None:
    """The function of a tokenizer of transformers; None if its tokens have no bytes of their own.

    It knows byte-level BPE and SentencePiece with byte pieces. Ids without a token have no bytes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    kinds = set(_kinds(json.loads(backend.to_str()).get("decoder")))
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    if "ByteLevel" in kinds:
        byte_of = _byte_level()
    elif "ByteFallback" in kinds:
        byte_of = None
    else:
        return None

    def token_bytes(token: int) -> bytes:
        if token in added:
            return added[token].encode()
        piece = backend.id_to_token(token)
        if piece is None:
            return b""
        if byte_of is not None:
            return bytes(byte_of[character] for character in piece)
        found = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(found[1], 16)]) if found else piece.replace(_SPACE, " ").encode()

    return token_bytes


def _kinds(decoder: Any) -> Iterator[str]:
    """The types of a decoder and of those inside it."""
    if isinstance(decoder, dict):
        yield decoder.get("type", "")
        for inner in decoder.get("decoders", ()):
            yield from _kinds(inner)


def _byte_level() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves, the others as characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + index): byte for index, byte in enumerate(others)}
