"""A hint where threads of this process spin on a machine that others keep busy."""

from __future__ import annotations

import os

import torch

from nwor_specpv.errors import logger

_told = False


def hint_at_spinning(device: torch.device) -> None:
    """Logs one line, once in a process, where waiting threads take the cores that work needs."""
    global _told
    if _told or device.type != "cpu":
        return
    hint = spinning_hint(torch.get_num_threads(), *_machine(), dict(os.environ))
    if hint is not None:
        _told = True
        logger.warning(hint)


def _machine() -> tuple[int, float]:
    """Cores that this process may use, and how many processes have lately wanted one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        return cores, os.getloadavg()[0]
    except (OSError, AttributeError):  # a system that does not tell
        return cores, 0.0


def spinning_hint(threads: int, cores: int, load: float, environment: dict[str, str]) -> str | None:
    """What to do, or None where threads do not spin or nobody else wants the cores."""
    passive = environment.get("OMP_WAIT_POLICY", "").lower() == "passive"
    short = environment.get("GOMP_SPINCOUNT") == "0" or environment.get("KMP_BLOCKTIME") == "0"
    if threads < 2 or passive or short or load < cores + 0.5:
        return None
    return (
        f"threads: {threads} of torch wait by spinning, and {load:.1f} processes want {cores} "
        "cores; start with OMP_WAIT_POLICY=passive, or use fewer threads (torch.set_num_threads, "
        "--threads)"
    )
