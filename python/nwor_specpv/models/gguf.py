"""Reads GGUF files: metadata and tensors, plain or in the block formats SmolLM2's file uses.

Only what a conversion needs: little-endian, version 2 and 3, types F32, F16, BF16, Q8_0 and Q4_1.
Weights stay on disk until a tensor is asked for.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nwor_specpv.errors import NworError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_BLOCK = 32  # elements of a quantised block
_MAX_SIZES = 4
_MAX_NESTING = 8  # arrays of arrays: no known key has any


@dataclass(frozen=True)
class _Format:
    name: str
    block: int  # elements
    block_bytes: int


_FORMATS = {
    0: _Format("F32", 1, 4),
    1: _Format("F16", 1, 2),
    3: _Format("Q4_1", _BLOCK, 20),
    8: _Format("Q8_0", _BLOCK, 34),
    30: _Format("BF16", 1, 2),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored. `shape` is outermost first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with ExitStack() as opened:
                file = opened.enter_context(path.open("rb"))
                self._data = opened.enter_context(
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                )
                self._read_header(path)
                self._opened = opened.pop_all()
        except OSError as error:
            raise NworError(f"{path}: cannot be read: {error.strerror}") from None
        except NworError:
            raise
        except (struct.error, ValueError) as error:
            raise NworError(f"{path}: not a readable GGUF file: {error}") from None

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def tensor(self, name: str) -> np.ndarray:
        """The tensor's values as float32."""
        info = self.tensors.get(name)
        if info is None:
            raise NworError(f"tensor {name} is not in the file, which has {len(self.tensors)}")
        raw = np.frombuffer(self._data[info.offset : info.offset + info.num_bytes], np.uint8)
        return _decode(info.format, raw).reshape(info.shape)

    def _read_header(self, path: Path) -> None:
        magic, version = self._data[:4], struct.unpack_from("<I", self._data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise NworError(
                f"{path}: got magic {magic!r}, version {version}, expected GGUF version 2 or 3"
            )
        num_tensors, num_keys = struct.unpack_from("<QQ", self._data, 8)
        self._at = 24
        for _ in range(num_keys):
            key = self._value(_STRING)
            if key in self.metadata:
                raise NworError(f"{path}: metadata {key}: stands twice, expected once")
            self.metadata[key] = self._value(self._scalar("<I"))
        found = [self._tensor_info(path) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise NworError(
                f"{path}: general.alignment: got {alignment!r}, expected a power of two"
            )
        start = -(-self._at // alignment) * alignment
        for info in found:
            end = start + info.offset + info.num_bytes
            if end > len(self._data):
                raise NworError(
                    f"{path}: tensor {info.name} ends at {end}, beyond the file's end at "
                    f"{len(self._data)}"
                )
            if info.name in self.tensors:
                raise NworError(f"{path}: tensor {info.name}: described twice, expected once")
            self.tensors[info.name] = TensorInfo(
                info.name, info.shape, info.format, start + info.offset, info.num_bytes
            )

    def _tensor_info(self, path: Path) -> TensorInfo:
        name = self._value(_STRING)
        num_sizes = self._scalar("<I")
        if num_sizes > _MAX_SIZES:
            raise NworError(
                f"{path}: tensor {name} has {num_sizes} sizes, expected at most {_MAX_SIZES}"
            )
        sizes = [self._scalar("<Q") for _ in range(num_sizes)]
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        if kind not in _FORMATS:
            names = ", ".join(known.name for known in _FORMATS.values())
            raise NworError(f"{path}: tensor {name} has type {kind}, expected one of {names}")
        known = _FORMATS[kind]
        if 0 in sizes:
            raise NworError(f"{path}: tensor {name} has sizes {sizes}, expected at least 1 each")
        if sizes and sizes[0] % known.block:
            raise NworError(
                f"{path}: tensor {name} has rows of {sizes[0]} elements, expected whole "
                f"{known.name} blocks of {known.block}"
            )
        num_bytes = math.prod(sizes) // known.block * known.block_bytes
        return TensorInfo(name, tuple(reversed(sizes)), known.name, offset, num_bytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _value(self, kind: int, nesting: int = 0) -> Any:
        if kind == _STRING:
            length = self._scalar("<Q")
            left = len(self._data) - self._at
            if length > left:
                raise ValueError(f"a string of {length} bytes at byte {self._at}, {left} are left")
            text = self._data[self._at : self._at + length].decode("utf-8")
            self._at += length
            return text
        if kind == _ARRAY:
            if nesting == _MAX_NESTING:
                raise ValueError(f"arrays nested more than {nesting} deep at byte {self._at}")
            item, count = self._scalar("<I"), self._scalar("<Q")
            return [self._value(item, nesting + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind} at byte {self._at}")
        return self._scalar(_SCALARS[kind])


def _decode(name: str, raw: np.ndarray) -> np.ndarray:
    if name == "F32":
        return raw.view("<f4").copy()
    if name == "F16":
        return raw.view("<f2").astype(np.float32)
    if name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if name == "Q8_0":  # a half-precision scale, then 32 signed bytes
        blocks = raw.reshape(-1, 34)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)
    # Q4_1: scale and minimum in half precision, then 16 bytes: low nibbles are the first half.
    blocks = raw.reshape(-1, 20)
    scale, minimum = (blocks[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    nibbles = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1)
    return (scale * nibbles + minimum).reshape(-1)
