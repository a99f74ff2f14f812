"""Mode `lossless` on model runner V2: an EAGLE head and partial passes of the target in turns.

    --speculative-config '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 16}'
    --scheduler-cls nwor_specpv.vllm.specpv.scheduler.LongContextScheduler

vLLM's own speculator drafts `specpv_draft_lookup` tokens with the head. Then the target
confirms them over its views, the head goes on from there, and so on, for as many passes as pay; the
head's last guesses follow the chain unconfirmed, up to `num_speculative_tokens` drafts in all.
vLLM's next step verifies them with full attention. Nothing of it is read on the host, so
asynchronous scheduling stays on. Where passes do not pay, the head drafts alone, as in vLLM.

It stands in the place of one name, `init_speculator`: see `hooks/speculators.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.v1.worker.gpu.spec_decode.autoregressive.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from nwor_specpv import _C
from nwor_specpv.errors import logger
from nwor_specpv.vllm.engine import engine_of

from .chain import Chains
from .draft_loop import DraftLoop
from .draft_models import EagleHead, SampledTarget
from .lengths import Lengths
from .tail import Tail
from .target import TargetModel, own_layers
from .views import ViewStore

# Proposals that a choice of blocks serves at least: what comes after it is seen as it is.
_PROPOSALS_PER_CHOICE = 4
# What draft logits hold for tokens that a draft is not: their probability is 0.
_NEVER = -1e30
# vLLM's sampler draws what replaces a rejected draft with the noise of the request's seed and the
# position. Drafts with the same noise would not be independent of it, so they have another seed.
_OTHER_SEED = 0x5DEECE66D1CE4E5


class PartialViewSpeculator(EagleSpeculator):
    """vLLM's EAGLE speculator, which drafts further with the target's help. Thread-safety: none."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._engine = engine_of(vllm_config)
        self.limit = self.num_speculative_steps
        self.lengths: Lengths = self._engine.lengths
        self._guesses = self.lengths.guesses
        self._target: TargetModel | None = None
        self._loop: DraftLoop | None = None
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._rows: dict[str, int] = {}  # of the store, by request
        self._chosen_at: dict[str, int] = {}  # lengths at most, when they chose blocks
        self.draft_seeds = torch.zeros_like(self.seeds)  # of drafts by passes
        self.latest_passes = 0  # of the latest drafts; 0: the head's alone
        self._offered = False
        self._offer_lengths()
        if not chooses_lengths(getattr(vllm_config.scheduler_config, "scheduler_cls", None)):
            logger.warning(
                "nwor_specpv: every step verifies %d drafts, even where that is slower than plain "
                "steps; add --scheduler-cls "
                "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler to let speed decide",
                self.limit,
            )

    def _offer_lengths(self) -> None:
        """Steps verify no drafts, few or all: vLLM captures graphs of each kind."""
        most = self.max_num_reqs
        self._dynamic = [(1, most, number) for number in dict.fromkeys(self.lengths.drafts)]
        self.speculative_config.num_speculative_tokens_per_batch_size = self._dynamic

    # ---- what vLLM calls ------------------------------------------------------------------------

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        names = own_layers(self._engine.layers, besides=self.draft_attn_layer_names)
        self._target = TargetModel(self.vllm_config, target_model, names)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # The target's manager was made just before, for all lengths; the head's for its single
        # rows knows one length only, and the scheduler must not take ours for vLLM's own.
        self.speculative_config.num_speculative_tokens_per_batch_size = None
        super().init_cudagraph_manager(cudagraph_mode)
        self.speculative_config.num_speculative_tokens_per_batch_size = self._dynamic
        self.prefill_cudagraph_manager = SpeculatorCudaGraphManager(
            self.vllm_config, self.device, cudagraph_mode, self.limit + 1
        )
        offer_larger_graphs(self.prefill_cudagraph_manager)
        self.speculative_config.num_speculative_tokens_per_batch_size = None

    def capture(self) -> None:
        super().capture()
        manager = self.prefill_cudagraph_manager
        sizes = {desc.num_reqs for desc in manager.graphs} if manager is not None else set()
        if not sizes or not self._possible():
            return
        try:
            self._capture_loop(sorted(sizes, reverse=True))
        except Exception as error:
            self._fail_at_start(error)

    @torch.inference_mode()
    def start(self) -> None:
        """What `capture` has not done, before the first request: memory; see `hooks.runner`.
        Nothing where no request can be long."""
        if not self._possible():
            return
        try:
            with self._engine.draft_failures.agreed():
                self._ready()
        except Exception as error:
            self._fail_at_start(error)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        num_tokens_across_dp: torch.Tensor | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
    ) -> torch.Tensor:
        count, passes, wanted = input_batch.num_reqs, 0, self.limit
        real = not dummy_run and not is_profile
        if real:
            if not self._offered:  # the target's manager, too, as soon as its runner is known
                self._offered = True
                self._offer_graphs()
            wanted = self._engine.num_drafts
            passes = 0 if self.lengths.given_up else self._engine.num_passes
        # Without drafts, too: the head's own K/V must not have gaps.
        with self._steps(1 if passes else max(1, wanted)):
            super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                num_tokens_across_dp,
                dummy_run,
                skip_attn_for_dummy_run,
                mm_inputs,
                is_profile,
            )
        if passes:
            try:
                self._draft_by_passes(input_batch, passes, num_sampled, num_rejected, last_sampled)
            except Exception as error:
                self._fail(error)
                self.draft_tokens[:count] = 0
                self._certain(input_batch.idx_mapping, 0)
                passes = 0
        self.latest_passes = passes
        return self.draft_tokens[:count]

    @contextlib.contextmanager
    def _steps(self, number: int) -> Iterator[None]:
        """The head drafts so many tokens."""
        self.num_speculative_steps = number
        try:
            yield
        finally:
            self.num_speculative_steps = self.limit

    def _offer_graphs(self) -> None:
        try:
            offer_larger_graphs(getattr(self._engine.runner, "cudagraph_manager", None))
        except Exception as error:  # vLLM's own names: without them, steps run without graphs
            logger.warning(
                "nwor_specpv: could not offer CUDA graphs for all draft lengths; some steps run "
                "without graphs: %s",
                error,
            )

    def _fail(self, error: Exception, reason: str = "") -> None:
        """The head drafts alone from now on; serving goes on."""
        self.lengths.give_up()
        consequence = "partial passes failed, so the head drafts alone until the next start"
        self._engine.draft_failures.add(error, consequence, reason)

    def _fail_at_start(self, error: Exception) -> None:
        """Memory that nobody would use is vLLM's to have."""
        self._loop = None
        self._graphs.clear()
        self._fail(error, "start")

    # ---- drafts by passes -----------------------------------------------------------------------

    def _draft_by_passes(
        self,
        input_batch: Any,
        passes: int,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> None:
        """Ranks agree before it that all are ready; behind it only where passes ran without graphs,
        whose replays have nothing of ours that could fail."""
        agreed, count = self._engine.draft_failures.agreed, input_batch.num_reqs
        with agreed():
            loop, padded = self._ready(), self._padded(count)
            table = self._table(padded)
            select = self._begin(
                loop, table, input_batch, passes, num_sampled, num_rejected, last_sampled
            )
        kinds = ("first" if select else "kept", *["later"] * (passes - 1), "close")
        for kind in kinds:
            self._run(kind, table)
        self.draft_tokens[:count] = loop.chains.drafts[:count, : self.limit]
        if any((kind, padded) not in self._graphs for kind in kinds):
            with agreed():
                loop.check()
        _C.count("specpv_draft_passes_total", passes)

    def _begin(
        self,
        loop: DraftLoop,
        table: torch.Tensor,
        input_batch: Any,
        passes: int,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> bool:
        """Tells the device of the proposal; whether it chooses blocks."""
        count = input_batch.num_reqs
        names, ends = input_batch.req_ids, input_batch.seq_lens_cpu_upper_bound.tolist()
        rows = self._view_rows(names, ends, input_batch.prefill_len_np.tolist())
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        prefix = input_batch.seq_lens[:count] - num_rejected[:count]
        roots = last_sampled[input_batch.idx_mapping].view(count)
        active = num_sampled[:count] > 0
        select = self._chooses(names, ends)
        device_rows = host.to(self.device, non_blocking=True)
        loop.begin(table, device_rows, prefix, active, roots, select=select)
        if self.draft_logits is not None:
            torch.bitwise_xor(self.seeds, _OTHER_SEED, out=self.draft_seeds)
            self._certain(input_batch.idx_mapping, passes + self._guesses)
            loop.chains.drafts[:, passes + self._guesses :] = 0
        return select

    def _run(self, kind: str, table: torch.Tensor) -> None:
        """A part of a proposal for as many requests as the table has; from its graph, if any."""
        graph = self._graphs.get((kind, table.shape[0]))
        if graph is not None:
            graph.replay()
        else:
            getattr(self._ready(), kind)(table)

    def _certain(self, requests: torch.Tensor, filled: int) -> None:
        """Drafts from the `filled`th on are token 0 with certainty: sampling must know.

        `requests` [B]: those of the proposal; drafts of others may still wait for their full step.
        """
        if self.draft_logits is not None and filled < self.limit:
            rest, own = self.draft_logits[:, filled:], requests.long()
            rest[own] = _NEVER
            rest[own, :, 0] = 0

    def _padded(self, count: int) -> int:
        sizes = [size for kind, size in self._graphs if kind == "first" and size >= count]
        return min(sizes, default=count)

    def _view_rows(self, names: list[str], ends: list[int], prompts: list[int]) -> list[int]:
        """The rows of requests that draft and are long, as far as there are any; -1: none.

        Who is in the midst of a prompt drafts nothing: a row of its own would be missing to others.
        """
        assert self._loop is not None
        store = self._loop.store
        told = zip(names, ends, prompts, strict=False)
        drafting = {name: end for name, end, prompt in told if end >= prompt}
        for name in self._rows.keys() - drafting.keys():
            store.close(self._rows.pop(name))
            self._chosen_at.pop(name, None)
        for name, end in drafting.items():
            if name not in self._rows and end > self.lengths.shortest:
                row = store.open()
                if row is not None:
                    self._rows[name] = row
        return [self._rows.get(name, -1) for name in names]

    def _chooses(self, names: list[str], ends: list[int]) -> bool:
        """Whether all choose blocks in this proposal: one has no choice yet, or an old one."""
        assert self._loop is not None
        # Lengths are known at most: each may be too large by a step's drafts.
        room = self._loop.store.budget.tail_capacity - self.limit - 1
        told = zip(names, ends, strict=False)
        long = [(name, end) for name, end in told if name in self._rows]
        if all(name in self._chosen_at and end - self._chosen_at[name] <= room
               for name, end in long):  # fmt: skip
            return False
        self._chosen_at.update(long)
        return True

    def _table(self, count: int) -> torch.Tensor:
        group = self.group_of(self._target.layers[0])
        return self.block_tables.input_block_tables[group][:count]

    def group_of(self, layer: str) -> int:
        groups = self.kv_cache_config.kv_cache_groups
        return next(i for i, group in enumerate(groups) if layer in group.layer_names)

    # ---- set-up ---------------------------------------------------------------------------------

    def _ready(self) -> DraftLoop:
        """Takes memory, once: for `capture` or at `start`; with fixed passes and a small view in a
        warm-up step of vLLM's own, which comes before `start`."""
        if self._loop is not None:
            return self._loop
        settings, target = self._engine.settings, self._target
        assert target is not None
        # vLLM may have lowered it to what its caches hold, and tells its runner alone.
        self.max_model_len = self.vllm_config.model_config.max_model_len
        caches = target.key_caches()
        rows = 1 + self._guesses
        store = ViewStore(
            settings.specpv(),
            caches,
            max_requests=settings.specpv_max_requests,
            max_batch=self.max_num_reqs,
            max_tokens=self.max_model_len,
            max_rows=rows + _PROPOSALS_PER_CHOICE * self.limit,
        )
        tail = Tail(caches, self.max_num_reqs, self.limit + rows)
        chains = Chains(self.max_num_reqs, rows, self.limit, self.max_model_len, self.device)
        self._loop = DraftLoop(
            chains,
            store,
            tail,
            target.layer_index,
            SampledTarget(self, target),
            EagleHead(self, chains),
            by_root=self.draft_logits is not None,
            keeps_failure=not self._engine.draft_failures.single_rank,
        )
        taken = (store.bytes + tail.bytes) / 1e6
        logger.info("nwor_specpv: views of %d requests take %.1f MB", store.max_requests, taken)
        return self._loop

    def _possible(self) -> bool:
        """Whether a request can be long. vLLM may have lowered the length to what caches hold."""
        return self.lengths.possible(self.vllm_config.model_config.max_model_len)

    def _capture_loop(self, sizes: list[int]) -> None:
        """All ranks have graphs, or none. Nothing waits for another rank while it is recorded.

        vLLM's own all-reduce, which keeps a list of buffers of what is recorded, may not bear it
        when one rank's recording breaks off.
        """
        agreed = self._engine.draft_failures.agreed
        with agreed():
            loop = self._ready()
            nobody = torch.zeros(0, dtype=torch.int32, device=self.device)
        with graph_capture(device=self.device):
            for size in sizes:
                with agreed():
                    table = self._table(size)
                    loop.begin(table, nobody, nobody, nobody.bool(), nobody.long())
                for kind in ("first", "kept", "later", "close"):
                    run = functools.partial(getattr(loop, kind), table)
                    run()
                    with agreed():
                        loop.check()
                        self._graphs[kind, size] = self._record(run)
                        loop.check()
        logger.info(
            "nwor_specpv: captured CUDA graphs of partial passes for batches of %s", sizes[::-1]
        )

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        manager, graph = self.prefill_cudagraph_manager, torch.cuda.CUDAGraph()
        assert manager is not None
        with torch.cuda.graph(graph, manager.pool):
            run()
        return graph


def chooses_lengths(scheduler: Any) -> bool:
    """Whether vLLM's `scheduler_cls`, a class, its name or None, decides how many are drafted."""
    return str(getattr(scheduler, "__qualname__", scheduler)).endswith("LongContextScheduler")


def offer_larger_graphs(manager: Any) -> None:
    """Lets a batch be padded to any larger graph of its own number of rows.

    vLLM looks at the graphs of the next larger number of tokens only. With several numbers of rows
    that graph is often another kind's, and the step would run without a graph. Graphs of batches
    whose requests have different numbers of rows come last: they are not full ones.
    """
    if manager is None:
        return
    found = {desc for descs in manager._candidates.values() for desc in descs}
    ordered = sorted(found, key=lambda desc: (desc.uniform_token_count is None, desc.num_tokens))
    for tokens, loras in list(manager._candidates):
        manager._candidates[tokens, loras] = [
            desc for desc in ordered if desc.num_tokens >= tokens and desc.num_active_loras == loras
        ]
