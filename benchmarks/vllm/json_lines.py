"""A file of JSON lines that runs add to. A run that was stopped may leave a part of a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """The file; two processes may use it as long as one of them writes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """All whole lines: a process that was stopped may leave a part of one."""
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def add(self, *records: dict[str, Any]) -> None:
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        with self._path.open("ab+") as file:
            if file.tell() and not self._ends_a_line():
                lines = "\n" + lines
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())

    def _ends_a_line(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def drop(self, status: str) -> None:
        """Forgets the records of a status."""
        kept = [record for record in self.read() if record.get("status") != status]
        self._path.unlink(missing_ok=True)
        self.add(*kept)
