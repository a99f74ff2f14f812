"""nwor_specpv: no write on reject and partial verification for speculative decoding.

Draft tokens' K/V is staged, attended to in flight, and only what was accepted is committed to the
paged cache. See `nwor-specpv status` for what this installation can do.
"""

from __future__ import annotations

from . import _broken, _stamp

# Before anything native: a library built for another torch must say so, not crash.
try:
    _stamp.check()
    import torch  # noqa: F401  (its libraries are the ones ours links)

    from . import _C  # noqa: F401
except (ImportError, OSError) as error:
    _broken.stop(error)

from ._C import (
    BYPASS_REASONS,
    COMMIT_ERRORS,
    Budget,
    ChainChunk,
    ChunkedResult,
    CommitVerdict,
    ContractChecker,
    Decision,
    DraftTree,
    Interceptor,
    NworConfig,
    Outcome,
    Receipt,
    RoundPlan,
    SessionBatch,
    SessionInfo,
    SessionStore,
    SlotAllocator,
    SpecPVConfig,
    VerifyRequest,
    VerifyResult,
    Violation,
    judge_greedy,
    verify_in_chunks,
)
from .attention import CompactView, PartialView, merge_states, verify_attention, verify_plan
from .config import Settings, load_config
from .errors import CapacityError, DesyncError, NworError, UnknownSessionError
from .layouts import LAYOUTS, cache_views
from .methods import Method, get_method, method_names, register_method
from .metrics import Metrics
from .ops import commit, write_kv
from .paths import get_cmake_dir, get_include
from .retrieval import block_summaries, build_view, select_blocks

__version__ = _stamp.read_stamp().version

__all__ = [
    "BYPASS_REASONS",
    "COMMIT_ERRORS",
    "LAYOUTS",
    "Budget",
    "CapacityError",
    "ChainChunk",
    "ChunkedResult",
    "CommitVerdict",
    "CompactView",
    "ContractChecker",
    "Decision",
    "DesyncError",
    "DraftTree",
    "Interceptor",
    "Method",
    "Metrics",
    "NworConfig",
    "NworError",
    "Outcome",
    "PartialView",
    "Receipt",
    "RoundPlan",
    "SessionBatch",
    "SessionInfo",
    "SessionStore",
    "Settings",
    "SlotAllocator",
    "SpecPVConfig",
    "UnknownSessionError",
    "VerifyRequest",
    "VerifyResult",
    "Violation",
    "block_summaries",
    "build_view",
    "cache_views",
    "commit",
    "get_cmake_dir",
    "get_include",
    "get_method",
    "judge_greedy",
    "load_config",
    "merge_states",
    "method_names",
    "register_method",
    "select_blocks",
    "verify_attention",
    "verify_in_chunks",
    "verify_plan",
    "write_kv",
]
