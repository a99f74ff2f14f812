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

    The place is where links lead. What is no file there, as a device or a pipe, is written into,
    and so is one that this process prints to.
    """
    if path.exists() and (not path.is_file() or is_stream(path)):
        with path.open("ab" if path.is_file() else "wb") as file:
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


def is_stream(path: Path) -> bool:
    """Whether it is what standard output or error goes to, as /dev/stdout always is."""
    there = path.stat()
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(there, os.fstat(number)):
                return True
    return False


def _become(file: int, path: Path) -> None:
    """Gives a new file the owner and the mode of the one whose place it will take.

    Files cannot be given to everybody; where not even the group can be kept, the old mode might
    keep those from reading who could.
    """
    try:
        there = path.stat()
    except FileNotFoundError:
        return
    for owner in (there.st_uid, -1):
        with contextlib.suppress(OSError):
            os.fchown(file, owner, there.st_gid)
            os.fchmod(file, stat.S_IMODE(there.st_mode))
            return


def write_whole(path: Path, text: str) -> None:
    with written_whole(path) as file:
        file.write(text.encode())
