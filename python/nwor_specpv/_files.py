"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes beside the place, under a name that no other writer has, and renames."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
