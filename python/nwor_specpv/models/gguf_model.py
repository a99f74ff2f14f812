"""A GGUF file's metadata and tensors; a damaged file is an error of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nwor_specpv.errors import NworError

from .packages import require_package

# What the package raises for files that are cut off, damaged or of another kind.
_DAMAGED = (ValueError, KeyError, IndexError, OverflowError, MemoryError, RecursionError)


class GgufModel:
    """An open file. Weights stay on disk until a tensor is asked for."""

    def __init__(self, path: Path) -> None:
        require_package("gguf", "gguf>=0.17", "a GGUF file")
        import gguf

        self._path = path
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
        except OSError as error:
            raise NworError(f"{path}: cannot be read: {error.strerror or error}") from None
        except _DAMAGED as error:
            raise NworError(f"{path}: not a readable GGUF file: {error}") from None
        if reader.endianess != gguf.GGUFEndian.LITTLE:
            raise NworError(f"{path}: got a big-endian GGUF file, expected a little-endian one")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, outermost first, as torch has it."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def tensor(self, name: str) -> np.ndarray:
        """The tensor's values as float32."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise NworError(f"{self._path}: tensor {name}: {error}") from None
