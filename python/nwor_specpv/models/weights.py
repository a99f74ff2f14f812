"""Loads and saves safetensors files; a damaged file is an error of one line."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

import torch

from nwor_specpv._files import written_whole
from nwor_specpv.errors import NworError

from .packages import require_package

SAFETENSORS = "safetensors>=0.8"  # for pip
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
)


def save_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the file whole or not at all."""
    require_package("safetensors", SAFETENSORS, "a safetensors file")
    from safetensors.torch import save

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = save(stored, dict(metadata) if metadata else None)
    with written_whole(path) as file:
        file.write(data)


def load_weights(
    path: Path, skipped: Container[str] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the tensors but for those `skipped`, copied into memory, and the metadata."""
    require_package("safetensors", SAFETENSORS, "a safetensors file")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            # The file is mapped: without a copy the tensors would change when the file does.
            names = [name for name in file.keys() if name not in skipped]  # noqa: SIM118
            tensors = {name: file.get_tensor(name).clone() for name in names}
            metadata = file.metadata() or {}
    except OSError as error:
        raise NworError(f"{path}: cannot be read: {error}") from None
    except SafetensorError as error:
        raise NworError(f"{path}: not a readable safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise NworError(f"{path}: tensor {name} has type {tensor.dtype}, expected {names}")
    return tensors, metadata
