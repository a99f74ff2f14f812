"""Parsing that all commands share: one line for wrong use, and types of values."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from nwor_specpv._files import is_stream

PROGRAM = "nwor-specpv"
EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Answers wrong use with one line on stderr and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{PROGRAM}: {' '.join(message.split())}; see {self.prog} --help\n")


def count(text: str) -> int:
    """A number of things, at least one."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected 1 or more")
    return value


def count_or_zero(text: str) -> int:
    """A number of things, or 0."""
    return 0 if text.strip() == "0" else count(text)


def counts(text: str) -> list[int]:
    """Several numbers, separated by commas."""
    return [count(part) for part in text.split(",")]


def heads(text: str) -> tuple[int, int]:
    """Query and KV heads: Hq/Hkv."""
    query, _, kv = text.partition("/")
    try:
        pair = count(query), count(kv)
    except argparse.ArgumentTypeError:
        pair = (1, 0)
    if pair[1] == 0 or pair[0] % pair[1] != 0:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected query and KV heads that divide them, such as 32/8"
        )
    return pair


def address(text: str) -> str:
    """The address of an endpoint. An empty one is refused: a variable was not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected the address of an endpoint")
    return text


def output_file(text: str) -> Path:
    """A file that can be written. Checked before the work, not after it."""
    path = Path(text)
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a file in a folder that exists")
    if not can_write(path):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a file in a writable folder")
    return path


def can_write(path: Path) -> bool:
    """Whether `write_whole` can write there, once missing folders have been made."""
    if os.path.exists(path) and (not path.is_file() or is_stream(path)):  # written in place
        return not path.is_dir() and os.access(path, os.W_OK)
    real = Path(os.path.realpath(path))
    there = next(folder for folder in real.parents if os.path.exists(folder))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def require_device(device: str) -> None:
    """Raises unless torch can use `device` here."""
    import torch

    from nwor_specpv.errors import NworError

    if device not in ("cpu", "cuda"):
        raise NworError(f"--device: got {device!r}, expected cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise NworError("--device: got cuda, but torch finds no GPU here; use --device cpu")
