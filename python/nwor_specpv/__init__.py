"""nwor_specpv: no write on reject and partial verification for speculative decoding.

Draft tokens' K/V is staged, attended to in flight, and only what was accepted is committed to the
paged cache. See `nwor-specpv status` for what this installation can do.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import _stamp

_stamp.check_python()  # before the sources that an old Python cannot read


def _loads_when_used() -> bool:
    """Whether this is the command line or vLLM's plugin.

    `status` and `doctor` explain a library that does not load, and help needs none. The plugin
    says in one line of vLLM's log what does not fit.
    """
    from itertools import pairwise  # an old Python has none

    program = Path((getattr(sys, "argv", None) or [""])[0]).name
    is_command = program == "nwor-specpv" or ("-m", __name__) in pairwise(sys.orig_argv)
    return is_command or "nwor_specpv_vllm" in sys.modules


# A library built for another torch is refused with a sentence: loaded, it would crash.
if not _loads_when_used():
    _stamp.load_native()
    from ._api import *  # noqa: F403
    from ._api import __all__ as __all__
    from ._api import __version__ as __version__
else:

    def __getattr__(name: str) -> object:
        if name.startswith("_") and name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _stamp.load_native()
        from . import _api

        return globals().setdefault(name, getattr(_api, name))
