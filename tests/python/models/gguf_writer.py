"""A GGUF writer of our own, in plain Python."""

from __future__ import annotations

import struct
from pathlib import Path


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def gguf_file(
    path: Path, meta: dict, tensors: dict[str, tuple[tuple[int, ...], int, bytes]]
) -> Path:
    """`tensors`: name -> (shape outermost first, type, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    for key, value in meta.items():
        out += gguf_string(key) + gguf_value(value)
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        out += gguf_string(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(out + b"\0" * (-len(out) % 32) + data)
    return path
