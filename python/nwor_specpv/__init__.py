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
    FULL_TRIGGERS,
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
    PartialCache,
    Receipt,
    RoundPlan,
    SessionBatch,
    SessionInfo,
    SessionStore,
    SlotAllocator,
    SpecPVConfig,
    StepDecision,
    StepOutcome,
    StoredCache,
    VerifyPolicy,
    VerifyRequest,
    VerifyResult,
    Violation,
    judge_greedy,
    verify_in_chunks,
)
from .compact import CompactViews, pinned_cache
from .config import Settings, load_config
from .drafters import Drafter, TreeConfig, make_drafter, register_drafter
from .errors import CapacityError, DesyncError, NworError, UnknownSessionError
from .layouts import LAYOUTS, cache_views
from .lossless import TwoLevel, confirm_greedy, confirm_sampling
from .methods import Method, get_method, method_names, register_method
from .metrics import Metrics
from .ops.acceptance import (
    accept_chain_sampling,
    accept_greedy,
    accept_sampling,
    accept_typical,
    make_coins,
)
from .ops.attention import (
    CompactView,
    PartialView,
    merge_rows,
    merge_states,
    verify_attention,
    verify_plan,
)
from .ops.kv import CommitTail, commit, write_kv, write_rows
from .ops.logits import target_probs
from .ops.retrieval import block_summaries, build_view, gather_view, select_blocks
from .ops.tree import (
    MAX_TREE_ROWS,
    Tree,
    describe_status,
    normalize_topology,
    tree_from_chain,
    tree_from_parents,
    tree_from_topk,
    tree_from_topology,
)
from .partial import PartialStore
from .paths import get_cmake_dir, get_include
from .session import Session

__version__ = _stamp.read_stamp().version

__all__ = [
    "BYPASS_REASONS",
    "COMMIT_ERRORS",
    "FULL_TRIGGERS",
    "LAYOUTS",
    "MAX_TREE_ROWS",
    "Budget",
    "CapacityError",
    "ChainChunk",
    "ChunkedResult",
    "CommitTail",
    "CommitVerdict",
    "CompactView",
    "CompactViews",
    "ContractChecker",
    "Decision",
    "DesyncError",
    "DraftTree",
    "Drafter",
    "Interceptor",
    "Method",
    "Metrics",
    "NworConfig",
    "NworError",
    "Outcome",
    "PartialCache",
    "PartialStore",
    "PartialView",
    "Receipt",
    "RoundPlan",
    "Session",
    "SessionBatch",
    "SessionInfo",
    "SessionStore",
    "Settings",
    "SlotAllocator",
    "SpecPVConfig",
    "StepDecision",
    "StepOutcome",
    "StoredCache",
    "Tree",
    "TreeConfig",
    "TwoLevel",
    "UnknownSessionError",
    "VerifyPolicy",
    "VerifyRequest",
    "VerifyResult",
    "Violation",
    "accept_chain_sampling",
    "accept_greedy",
    "accept_sampling",
    "accept_typical",
    "block_summaries",
    "build_view",
    "cache_views",
    "commit",
    "confirm_greedy",
    "confirm_sampling",
    "describe_status",
    "gather_view",
    "get_cmake_dir",
    "get_include",
    "get_method",
    "judge_greedy",
    "load_config",
    "make_coins",
    "make_drafter",
    "merge_rows",
    "merge_states",
    "method_names",
    "normalize_topology",
    "pinned_cache",
    "register_drafter",
    "register_method",
    "select_blocks",
    "target_probs",
    "tree_from_chain",
    "tree_from_parents",
    "tree_from_topk",
    "tree_from_topology",
    "verify_attention",
    "verify_in_chunks",
    "verify_plan",
    "write_kv",
    "write_rows",
]
