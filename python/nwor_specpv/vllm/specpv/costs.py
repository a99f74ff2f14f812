"""What partial passes cost on model runner V1, measured at start: passes over an empty cache.

They run as they will in serving, on the caches vLLM serves from, and write nothing there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from .failures import DraftFailures
from .partial_pass import PartialPass
from .policy import StepCosts, fit_costs
from .tail import Tail
from .target import TargetModel
from .views import ViewStore

T = TypeVar("T")
_REPEATS = 3  # of a measured pass; the quickest counts
_ROWS = 8  # of the larger one of one request


def measure_passes(
    target: TargetModel, store: ViewStore, tail: Tail, failures: DraftFailures
) -> StepCosts:
    """Costs of passes of one request, rank 0's on every rank.

    REQUIRES: all ranks measure, as a pass runs on all of them. All of them raise, or none.
    """
    device, pages = tail.keys.device, store.key_caches[0].shape[0]
    tokens = min(pages * store.page_size, 4 * store.budget.static_tokens)
    table = torch.arange(-(-tokens // store.page_size), dtype=torch.int32, device=device)
    store.num_blocks.fill_(-1)  # all of the context

    def make_pass(rows: int, context: int) -> PartialPass:
        return PartialPass(
            store=store,
            tail=tail,
            layer_index=target.layer_index,
            block_table=table[None],
            prefix_lens=torch.tensor([context], dtype=torch.int32, device=device),
            tail_lens=torch.zeros(1, dtype=torch.int32, device=device),
            query_start=torch.tensor([0, rows], dtype=torch.int32, device=device),
            slots=torch.full((rows,), -1, dtype=torch.int64, device=device),
            num_rows=rows,
            has_tail=False,
            select=False,
            keeps_failure=not failures.single_rank,
        )

    def run(passed: PartialPass) -> None:
        nothing = torch.zeros(passed.num_rows, dtype=torch.int64, device=device)
        said = target.greedy(passed, nothing, nothing)
        with failures.agreed():  # once for each pass, as in serving
            passed.check()
            said.tolist()

    def timed(rows: int, context: int) -> float:
        def prepare() -> PartialPass:
            with failures.agreed():
                return make_pass(rows, context)

        return _quickest(prepare, run)

    return _rank_zeros(fit_costs(timed(1, 0), timed(_ROWS, 0), _ROWS, timed(1, tokens), tokens))


def _quickest(prepare: Callable[[], T], run: Callable[[T], None]) -> float:
    """Seconds of `run`, to the end of what it launches."""
    best = float("inf")
    for _ in range(1 + _REPEATS):
        prepared = prepare()
        torch.accelerator.synchronize()
        started = time.perf_counter()
        run(prepared)
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _rank_zeros(costs: StepCosts) -> StepCosts:
    """The same on every tensor-parallel rank: they must choose alike."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group.broadcast_object(costs, src=0) if group.world_size > 1 else costs
