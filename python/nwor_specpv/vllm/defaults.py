"""What `enable_specpv` and `draft_tree` choose where the user has said nothing to vLLM.

Pure functions: what was said comes in, what to set goes out. `hooks.arguments` calls them where
vLLM makes an engine's configuration. What the user has said always stands; `specpv.rules` refuses
what does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .specpv.rules import DRAFTER, HEADS, LONG_CONTEXT_SCHEDULER, LOSSLESS, REFRESH, SCHEDULERS
from .tree.shape import ARM_ROWS

# Mode `lossless` without a head, on a GPU.
SELF_DRAFT = {"method": "ngram_gpu", "num_speculative_tokens": 16}
# The same on the CPU platform, which has model runner V1 alone.
SELF_DRAFT_ON_CPU = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 16}
# Mode `refresh`: vLLM's own lookups.
LOOKUPS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
# A head's drafts and those of the passes, with the row that is no draft: 16 rows.
HEAD_DRAFTS = 15

# `draft_tree: auto`.
TREE_SCHEDULER = "nwor_specpv.vllm.tree.scheduler.TreeScheduler"

# Methods that our speculator on model runner V2 takes.
DRAFTED_ON_V2 = (*HEADS, SELF_DRAFT["method"])

# Full graphs of more rows save little: the host is faster than such a step.
_MOST_GRAPH_ROWS = 2048
# A batch is padded by at most an eighth to the next graph.
_GRAPH_STEP = 8


def speculation(mode: str, said: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Keys to add to the speculative config."""
    drafter = said.get("method")
    if drafter is None and said.get("model") is None:
        own = SELF_DRAFT_ON_CPU if on_cpu else SELF_DRAFT
        found = own if mode == LOSSLESS else LOOKUPS
    elif mode == LOSSLESS and drafter in HEADS:
        found = {"num_speculative_tokens": HEAD_DRAFTS}
    elif mode == LOSSLESS and (drafter in DRAFTED_ON_V2 or said.get("model") == DRAFTER):
        found = {"num_speculative_tokens": SELF_DRAFT["num_speculative_tokens"]}
    else:
        return {}
    return {key: value for key, value in found.items() if said.get(key) is None}


def tree_drafts(tree: int | str) -> int:
    """Drafts of the largest tree."""
    return (ARM_ROWS[-1] if tree == "auto" else int(tree)) - 1


def tree_ranges(tree: int | str) -> list[tuple[int, int, int]]:
    """For vLLM, (first, last, drafts) of numbers of requests. Where our scheduler chooses, this
    says that numbers of drafts vary: vLLM then fills no request up with drafts that nobody made."""
    return [(1, 1, tree_drafts(tree))] if tree == "auto" else []


def tree_speculation(tree: int | str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Keys to add to the speculative config for trees of `tree` rows, or `auto`."""
    if tree == "off" or said.get("method") not in HEADS:
        return {}
    found: dict[str, Any] = {"num_speculative_tokens": tree_drafts(tree)}
    if tree == "auto":
        found["num_speculative_tokens_per_batch_size"] = tree_ranges(tree)
    return {key: value for key, value in found.items() if said.get(key) is None}


def scheduler(
    mode: str, drafter: str, *, runner_v2: bool, asynchronous: bool, prefix_caching: bool
) -> str | None:
    """The scheduler class that goes with these; None: vLLM's own."""
    if mode == LOSSLESS and runner_v2 and drafter in DRAFTED_ON_V2:
        return LONG_CONTEXT_SCHEDULER
    if mode == REFRESH and prefix_caching:
        return SCHEDULERS[asynchronous]
    return None


def graph_rows(max_num_seqs: int, rows: int, largest: int, max_tokens: int) -> list[int]:
    """Rows of more CUDA graphs, beyond vLLM's `largest`, for requests of `rows` rows each.

    They reach `max_num_seqs` requests, or as many as have 2048 rows or fit in a step of
    `max_tokens`. Each has an eighth more requests than the one before: 13 graphs at most for 17
    rows, besides vLLM's own 51.
    """
    requests = largest // rows
    most = min(max_num_seqs, min(_MOST_GRAPH_ROWS, max_tokens) // rows)
    found = []
    while requests < most:
        requests = min(most, requests + max(1, requests // _GRAPH_STEP))
        found.append(requests * rows)
    return found


def line(setting: str, filled: Sequence[str]) -> str:
    """What the log says of everything that a setting of ours has set."""
    return (
        f"nwor_specpv: {setting} has set what was left open: {'; '.join(filled)}. A value that "
        "is passed to vLLM stands"
    )
