"""Models by folder, and the default one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nwor_specpv import NworError
from nwor_specpv.models import smollm2


def load_model(
    source: str | Path | None = None,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> tuple[Any, Any]:
    """(model, tokenizer or None) from a Hugging Face folder; None: SmolLM2-135M-Instruct."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder = Path(source) if source is not None else smollm2(dtype)
    if not folder.is_dir():
        raise NworError(f"model: got {str(folder)!r}, expected the folder of a model")
    if not (folder / "config.json").is_file():
        raise NworError(f"model: {folder} has no config.json, expected a Hugging Face model folder")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
    except OSError as error:  # what transformers says when weights are missing
        raise NworError(f"model: {folder} cannot be loaded: {_first_line(error)}") from None
    except ValueError as error:
        raise NworError(
            f"model: {folder} holds no decoder model that transformers can load: "
            f"{_first_line(error)}"
        ) from None
    finally:
        if bars:
            logging.enable_progress_bar()
    tokenizer = None
    if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.to(device).eval(), tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
