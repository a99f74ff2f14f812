"""The names that `import nwor_specpv` offers, from the native library and the package's modules."""

from __future__ import annotations

from . import _stamp
from ._C import (
    BYPASS_REASONS,
    COMMIT_ERRORS,
    FULL_TRIGGERS,
    Budget,
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
from .ops.logits import likeliest_tokens, target_probs
from .ops.retrieval import block_summaries, build_view, gather_view, select_blocks
from .ops.tree import (
    MAX_TREE_ROWS,
    Tree,
    describe_status,
    tree_from_chain,
    tree_from_parents,
    tree_from_topk,
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
    "likeliest_tokens",
    "load_config",
    "make_coins",
    "make_drafter",
    "merge_rows",
    "merge_states",
    "pinned_cache",
    "register_drafter",
    "select_blocks",
    "target_probs",
    "tree_from_chain",
    "tree_from_parents",
    "tree_from_topk",
    "verify_attention",
    "verify_plan",
    "write_kv",
    "write_rows",
]
