"""Writes a model as a Hugging Face folder: weights, config, tokenizer; whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from nwor_specpv.errors import NworError

from .packages import require_package
from .weights import SAFETENSORS

# done, total, what is being written
Progress = Callable[[int, int, str], None]

_DTYPES = ("float32", "float16", "bfloat16")


def cache_root() -> Path:
    """The folder of converted models: nwor_specpv in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nwor_specpv"


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise NworError(f"dtype: got {name!r}, expected one of {', '.join(_DTYPES)}")
    return getattr(torch, name)


def print_progress(done: int, total: int, what: str) -> None:
    """Rewrites one line on stderr; prints nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{what}: {done} of {total}\033[K", end=end, file=sys.stderr, flush=True)


def write_folder(
    destination: Path,
    files: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> Path:
    """Makes `destination` with the given files (text, or JSON for anything else) and the weights.

    The folder is built beside its place and renamed. Of two processes the first one wins.
    """
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        _write_beside(destination, files, tensors)
    except OSError as error:  # a disk that is full, or cannot be written
        raise NworError(
            f"{destination}: cannot be written ({error.strerror or error}); it needs "
            f"{-(-num_bytes // 1_000_000)} MB there: free some space, or set XDG_CACHE_HOME to a "
            "folder with more"
        ) from error
    return destination


def convert_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
    total: int,
    dtype: str,
    what: str,
    progress: Progress = print_progress,
) -> dict[str, torch.Tensor]:
    """Returns the tensors in `dtype`, contiguous; tells `progress` after each of the `total`."""
    converted = {}
    for name, tensor in tensors:
        converted[name] = tensor.to(torch_dtype(dtype)).contiguous()
        progress(len(converted), total, what)
    return converted


def _write_beside(
    destination: Path, files: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            (staging / name).write_text(text, encoding="utf-8")
        _save(staging / "model.safetensors", tensors)
        staging.chmod(0o755)
        try:
            staging.rename(destination)
        except OSError:
            if not destination.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    require_package("safetensors", SAFETENSORS, "a model's folder")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(0o644)  # the library writes files that only their owner may read
