"""The ops, checked: `torch.ops.nwor_specpv.*` with wrong use reported as NworError.

Every op has CPU, CUDA and shape-only (fake) kernels. Under torch.compile the torch op is called
directly; `verify_plan` is to be given its `plan` there, as the size of one is not traced.
"""

from __future__ import annotations

from .acceptance import (
    accept_chain_sampling,
    accept_greedy,
    accept_sampling,
    make_coins,
)
from .attention import merge_rows, merge_states, verify_attention, verify_plan
from .decoder import attention_inputs, layer_output, linear_rows
from .drafting import certain_logits, ngram_lookup
from .kv import CommitTail, commit, write_kv, write_rows
from .logits import likeliest_tokens, target_probs
from .retrieval import block_summaries, build_view, gather_view, select_blocks
from .tree import tree_from_chain, tree_from_parents, tree_from_topk

__all__ = [
    "CommitTail",
    "accept_chain_sampling",
    "accept_greedy",
    "accept_sampling",
    "attention_inputs",
    "block_summaries",
    "build_view",
    "certain_logits",
    "commit",
    "gather_view",
    "layer_output",
    "likeliest_tokens",
    "linear_rows",
    "make_coins",
    "merge_rows",
    "merge_states",
    "ngram_lookup",
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
