"""Reads what a browser's screenshot shows: 8-bit RGB or RGBA, not interlaced."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np


def read_png(path: Path) -> np.ndarray:
    """[height, width, 3] uint8."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, size, channels = 8, b"", (0, 0), 3
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, chunk = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", chunk)
            assert (depth, interlaced) == (8, 0)
            size, channels = (height, width), {2: 3, 6: 4}[color]
        elif kind == b"IDAT":
            body += chunk
        at += length + 12
    height, width = size
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width, channels), np.int32)
    before = np.zeros((width, channels), np.int32)
    for y in range(height):
        raw = lines[y, 1:].astype(np.int32).reshape(width, channels)
        before = out[y] = _unfilter(int(lines[y, 0]), raw, before)
    return out[..., :3].astype(np.uint8)


def _unfilter(kind: int, raw: np.ndarray, up: np.ndarray) -> np.ndarray:
    if kind == 0:
        return raw
    if kind == 1:
        return np.cumsum(raw, 0) % 256
    if kind == 2:
        return (raw + up) % 256
    row = np.zeros_like(raw)
    left, corner = np.zeros(raw.shape[1], np.int32), np.zeros(raw.shape[1], np.int32)
    for x in range(len(raw)):
        if kind == 3:
            guess = (left + up[x]) // 2
        else:
            base = left + up[x] - corner
            near = [np.abs(base - side) for side in (left, up[x], corner)]
            guess = np.where(
                (near[0] <= near[1]) & (near[0] <= near[2]),
                left,
                np.where(near[1] <= near[2], up[x], corner),
            )
        left = row[x] = (raw[x] + guess) % 256
        corner = up[x]
    return row
