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
from .ops.cut import FINISH_REASONS, Cut, GrammarCut, StopStrings, cut_on_host, cut_path
from .ops.kv import CommitSummaries, CommitTail, commit, write_kv
from .ops.logits import target_probs
from .ops.retrieval import block_summaries, build_view, gather_view, select_blocks
from .ops.tree import (
    MAX_TREE_ROWS,
    StaticTree,
    Tree,
    describe_status,
    normalize_topology,
    static_tree,
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
    "FINISH_REASONS",
    "FULL_TRIGGERS",
    "LAYOUTS",
    "MAX_TREE_ROWS",
    "Budget",
    "CapacityError",
    "ChainChunk",
    "ChunkedResult",
    "CommitSummaries",
    "CommitTail",
    "CommitVerdict",
    "CompactView",
    "CompactViews",
    "ContractChecker",
    "Cut",
    "Decision",
    "DesyncError",
    "DraftTree",
    "Drafter",
    "GrammarCut",
    "Interceptor",
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
    "StaticTree",
    "StepDecision",
    "StepOutcome",
    "StopStrings",
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
    "cut_on_host",
    "cut_path",
    "describe_status",
    "gather_view",
    "get_cmake_dir",
    "get_include",
    "judge_greedy",
    "load_config",
    "make_coins",
    "make_drafter",
    "merge_rows",
    "merge_states",
    "normalize_topology",
    "pinned_cache",
    "register_drafter",
    "select_blocks",
    "static_tree",
    "target_probs",
    "tree_from_chain",
    "tree_from_parents",
    "tree_from_topk",
    "tree_from_topology",
    "verify_attention",
    "verify_in_chunks",
    "verify_plan",
    "write_kv",
]
