"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file beside the place, under a name that no other writer has; renamed at the end.

    The place is where links lead. What is no file there, as a device or a pipe, is written into.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            _become(file.fileno(), path)
            yield file
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _become(file: int, path: Path) -> None:
    """Gives a new file the owner and the mode of the one whose place it will take."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError):  # of somebody else, who cannot be given files
        os.fchown(file, there.st_uid, there.st_gid)
    os.fchmod(file, stat.S_IMODE(there.st_mode))


def write_whole(path: Path, text: str) -> None:
    with written_whole(path) as file:
        file.write(text.encode())
