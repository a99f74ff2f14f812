"""Loads models from folders; the default is SmolLM2-135M-Instruct."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nwor_specpv import NworError
from nwor_specpv.models import smollm2
from nwor_specpv.models.folder import torch_dtype

from .runner import check_model

_ADVICE = "fetch or convert it again"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name


def load_model(
    source: str | Path | None = None,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> tuple[Any, Any]:
    """(model, tokenizer or None) from a Hugging Face folder; None: SmolLM2-135M-Instruct."""
    wanted = torch_dtype(dtype)
    folder = Path(source) if source is not None else smollm2(dtype)
    if not folder.is_dir():
        raise NworError(
            f"model: got {str(folder)!r}, expected the folder of a model{_hint(source)}"
        )
    if not (folder / "config.json").is_file():
        raise NworError(f"model: {folder} has no config.json, expected a Hugging Face model folder")
    with _quiet():
        model, found = _load_weights(folder, wanted)
    check_model(model)  # first: an encoder has no weights for generation
    # transformers leaves missing and wrong weights random and prints a table.
    for keys, problem in (
        (sorted(found["missing_keys"]), "no weights for"),
        (sorted(key for key, *_ in found["mismatched_keys"]), "weights of another size for"),
    ):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise NworError(f"model: {folder} has {problem} {keys[0]}{more}; {_ADVICE}")
    return model.to(device).eval(), _load_tokenizer(folder)


def _hint(source: str | Path | None) -> str:
    """How to download a model, if `source` may be its name on the Hugging Face Hub."""
    if _HUB_ID.fullmatch(str(source)) is None:
        return ""
    return (
        f"; a model of the Hugging Face Hub is downloaded first: hf download {source} "
        f"--local-dir {Path(str(source)).name}"
    )


def _load_weights(folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:  # missing or truncated files
        raise NworError(
            f"model: {folder} cannot be loaded: {_first_line(error)}; {_ADVICE}"
        ) from None
    except ValueError as error:
        raise NworError(
            f"model: {folder} has no decoder model that transformers can load: {_first_line(error)}"
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides transformers' progress bars and tables."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load_tokenizer(folder: Path) -> Any:
    """Returns the folder's tokenizer; None if it has none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise NworError(
            f"model: the tokenizer in {folder} cannot be loaded: {_first_line(error)}; {_ADVICE}"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
