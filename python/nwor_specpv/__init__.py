"""nwor_specpv: no write on reject and partial verification for speculative decoding.

Draft tokens' K/V is staged, attended to in flight, and only what was accepted is committed to the
paged cache. See `nwor-specpv status` for what this installation can do.
"""

from __future__ import annotations

from . import _stamp

# Before anything native: a library built for another torch must say so, not crash.
_stamp.check()

import torch  # noqa: E402, F401  (its libraries are the ones ours links)

from ._C import (  # noqa: E402
    BYPASS_REASONS,
    COMMIT_ERRORS,
    CommitVerdict,
    ContractChecker,
    Decision,
    Interceptor,
    NworConfig,
    Outcome,
    Receipt,
    RoundPlan,
    Violation,
)
from .errors import NworError  # noqa: E402
from .layouts import LAYOUTS, cache_views  # noqa: E402
from .metrics import Metrics  # noqa: E402
from .ops import commit, write_kv  # noqa: E402
from .paths import get_cmake_dir, get_include  # noqa: E402

__version__ = _stamp.read_stamp().version

__all__ = [
    "BYPASS_REASONS",
    "COMMIT_ERRORS",
    "LAYOUTS",
    "CommitVerdict",
    "ContractChecker",
    "Decision",
    "Interceptor",
    "Metrics",
    "NworConfig",
    "NworError",
    "Outcome",
    "Receipt",
    "RoundPlan",
    "Violation",
    "cache_views",
    "commit",
    "get_cmake_dir",
    "get_include",
    "write_kv",
]
