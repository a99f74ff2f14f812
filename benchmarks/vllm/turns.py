"""Processes with engines that are up at once: none measures while another starts, and they measure
in turn.

A host, or one of its cores, is slower for seconds now and then. So that all sides see the same of
it, a side passes its turn on in the middle of what it measures, every tenth of a second, and all
measure the same thing on the same core.

Each engine is a process with a `Turns` of its own; the process that has started them has a `Gate`.
What they tell each other are files in a folder that all of them share.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

UNFINISHED = 75  # the status of a call that has something left
_LOOK_S = 0.05
_CORES = sorted(os.sched_getaffinity(0))
_PAUSE_S, _SHORT_PAUSE_S = 0.2, 0.005  # in which another process takes its turn


def take_core(number: int) -> None:
    """Has this thread run on a core of its own, the same for all who say the same number."""
    os.sched_setaffinity(0, {_CORES[number % len(_CORES)]})


class Gate:
    """Opens when all engines are up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for path in (self._open, *folder.glob("*.up")):
            path.unlink(missing_ok=True)

    @property
    def _open(self) -> Path:
        return self._folder / "gate.open"

    def look(self, running: Iterable[str]) -> None:
        """`running`: names of the processes that have not ended."""
        if all((self._folder / f"{name}.up").exists() for name in running):
            self._open.touch()


class Turns:
    """Of one process: `with turns:` nobody else measures."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._up = folder, folder / f"{name}.up"
        self._lock: IO[str] | None = None

    def wait(self) -> None:
        """This engine is up: returns when the others are."""
        self._up.touch()
        while not (self._folder / "gate.open").exists():
            time.sleep(_LOOK_S)

    def __enter__(self) -> None:
        self._lock = (self._folder / "turn.lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._leave(_PAUSE_S)

    def pass_on(self) -> None:
        """Within `with turns:`: lets the others measure, and waits for this one's next turn."""
        if self._lock is not None:
            self._leave(_SHORT_PAUSE_S)
            self.__enter__()

    def _leave(self, pause: float) -> None:
        assert self._lock is not None
        self._lock.close()
        self._lock = None
        time.sleep(pause)


def launch(command: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process, with a group of its own, whose output goes to the end of a file."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=variables, stdout=file, stderr=file, start_new_session=True
        )


def wait(child: subprocess.Popen[bytes], deadline: float, look: Any) -> int:
    """The status of the process; it is ended, with its own ones, if it outlasts the deadline."""
    try:
        while True:
            look()
            try:
                return child.wait(timeout=1)
            except subprocess.TimeoutExpired:
                pass
            if time.time() > deadline:
                return UNFINISHED
    finally:
        end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
