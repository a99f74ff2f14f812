"""Which vLLM this is. `adapter` is the object that knows what is particular to it.

A version that was read has an adapter of its own. Another one is served by an adapter whose
functions and classes it has unchanged, or not at all. Nothing outside of this package asks for a
version.
"""

from __future__ import annotations

import re
from pathlib import Path

from nwor_specpv import _stamp

from . import v0_26, v0_32, v0_33
from .adapter import Adapter
from .functions import VllmFields, VllmFunction, VllmNames, signature_problem
from .sources import Difference, FolderRelease, Release, open_release

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Difference",
    "Release",
    "VllmFields",
    "VllmFunction",
    "VllmNames",
    "adapter",
    "choose",
    "closest",
    "open_release",
    "signature_problem",
    "supported",
]

# The oldest first.
ADAPTERS: tuple[Adapter, ...] = (v0_26.ADAPTER, v0_32.ADAPTER, v0_33.ADAPTER)

adapter: Adapter = ADAPTERS[0]
_served = ""  # an untested version that was let in


def supported() -> str:
    """The versions that were read, for messages."""
    names = [known.version for known in ADAPTERS]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def choose(version: str, site: Path | None = None) -> tuple[str | None, str | None]:
    """Chooses the adapter of this version of vLLM, whose package lies in the folder `site`.

    Returns the problem if there is none for it, and a warning if one of another version fits. Local
    parts such as +cpu do not matter.
    """
    global adapter, _served
    plain = version.partition("+")[0]
    for known in ADAPTERS:
        if plain == known.version:
            adapter, _served = known, ""
            return None, None
    if version == _served:  # it was said
        return None, None
    fitting = _fitting(plain, site)
    if fitting is None:
        return (
            f"vLLM {version} is not supported; run `{_stamp.install_vllm(_built_for())}` (vLLM "
            f"{supported()} works, each with its torch)"
        ), None
    adapter, _served = fitting, version
    return None, (
        f"vLLM {version} was not tested; it has the functions of vLLM {fitting.version} and is "
        f"served as such. Tested versions: {supported()}"
    )


def _built_for() -> str:
    """The torch of our library; empty where it was not built."""
    try:
        return _stamp.read_stamp().torch
    except _stamp.StampMismatch:
        return ""


def closest(version: str) -> list[Adapter]:
    """All adapters, the nearest version first; of two as near, the older."""
    wanted = _numbers(version)
    if wanted is None:
        return list(reversed(ADAPTERS))
    older = [known for known in ADAPTERS if _numbers(known.version) <= wanted]
    newer = [known for known in ADAPTERS if known not in older]
    return [*reversed(older), *newer]


def _fitting(version: str, site: Path | None) -> Adapter | None:
    """The nearest adapter that this vLLM has not changed anything of."""
    if site is None or _numbers(version) is None:
        return None
    release = FolderRelease(site)
    return next((known for known in closest(version) if not release.differences(known)), None)


def _numbers(version: str) -> tuple[int, ...] | None:
    """(0, 32, 1) of 0.32.1 and 0.32.1.dev5; None of what is no version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else None
