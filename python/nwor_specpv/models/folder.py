"""Writes a model as a Hugging Face folder: weights, config, tokenizer; whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nwor_specpv.errors import NworError

# done, total, what is being written
Progress = Callable[[int, int, str], None]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def cache_root() -> Path:
    """Where converted models are kept: nwor_specpv in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nwor_specpv"


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise NworError(f"dtype: got {name!r}, expected one of {', '.join(_DTYPES)}")
    return getattr(torch, name)


def print_progress(done: int, total: int, what: str) -> None:
    """One line on stderr that rewrites itself; silent where nobody looks."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{what}: {done} of {total}\033[K", end=end, file=sys.stderr, flush=True)


def write_folder(
    destination: Path,
    files: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: str,
    progress: Progress = print_progress,
) -> Path:
    """Makes `destination` with the given files (text, or JSON for anything else) and the weights.

    `tensors` yields every tensor of `shapes` in its order; only one is in memory at a time. The
    folder is built beside its place and renamed; where two processes do so the first one wins.
    """
    with _explained(destination, shapes, dtype):
        _write_beside(
            destination,
            files,
            lambda path: _write_safetensors(path, shapes, tensors, dtype, progress),
        )
    return destination


@contextmanager
def _explained(
    destination: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> Iterator[None]:
    """A disk that is full, or cannot be written, in one line."""
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    needed_mb = -(-elements * torch_dtype(dtype).itemsize // 1_000_000)
    try:
        yield
    except OSError as error:
        raise NworError(
            f"{destination}: cannot be written ({error.strerror or error}); it needs {needed_mb} "
            "MB there: free them, or set XDG_CACHE_HOME to a folder that has them"
        ) from error


def _write_beside(
    destination: Path, files: Mapping[str, Any], write_weights: Callable[[Path], None]
) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            (staging / name).write_text(text, encoding="utf-8")
        write_weights(staging / "model.safetensors")
        staging.chmod(0o755)
        try:
            staging.rename(destination)
        except OSError:
            if not destination.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: str,
    progress: Progress,
) -> None:
    wanted = torch_dtype(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * wanted.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    expected = iter(shapes.items())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, (name, tensor) in enumerate(tensors, 1):
            if next(expected, None) != (name, tuple(tensor.shape)):
                raise NworError(f"tensor {name} {list(tensor.shape)}: not the next one announced")
            stored = tensor.to(wanted).contiguous().view(-1)
            file.write(stored.view(torch.uint8).numpy().tobytes())
            progress(done, len(shapes), path.parent.name.strip("."))
        if next(expected, None) is not None:
            raise NworError(f"{path.name}: fewer tensors than announced")
