"""Reads and writes safetensors files with torch alone: bfloat16 included, nothing else needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from nwor_specpv._files import written_whole
from nwor_specpv.errors import NworError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def save(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the file whole or not at all."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, end = [], 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        start, end = end, end + len(raw)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, copied into memory, and the metadata."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NworError(f"{path}: cannot be read: {error.strerror}") from None
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__", {})
        body = memoryview(data)[8 + size :]
        tensors = {name: _tensor(body, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise NworError(f"{path}: not a readable safetensors file: {error}") from None
    return tensors, metadata


def _tensor(body: memoryview, entry: Mapping[str, object]) -> torch.Tensor:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError(f"a tensor ends at byte {end} of {len(body)}")
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if end - start != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"a tensor {shape} of {entry['dtype']} has {end - start} bytes")
    if end == start:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(body[start:end]), dtype=torch.uint8)
    return raw.view(dtype).view(shape)
