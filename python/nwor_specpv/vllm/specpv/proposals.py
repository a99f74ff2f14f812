"""Proposals by partial passes of the target (model runner V2): what speculators of ours share.

A speculator guesses, by a head or by a lookup, and passes of the target over its views confirm the
guesses. The last guesses follow the chain unconfirmed. One captured graph per part of a proposal
and batch size runs all of it, and the host reads nothing.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.distributed.parallel_state import graph_capture

from nwor_specpv import _C
from nwor_specpv.errors import logger
from nwor_specpv.ops import certain_logits
from nwor_specpv.vllm import versions
from nwor_specpv.vllm.engine import Engine, engine_of
from nwor_specpv.vllm.hooks.graph_lengths import offer_larger_graphs

from .chain import Chains
from .draft_loop import DraftLoop, Head
from .draft_models import SampledTarget
from .draft_sampling import own_logits
from .lengths import Lengths
from .tail import Tail
from .target import TargetModel
from .views import ViewStore

# Proposals that a choice of blocks serves at least: what comes after it is seen as it is.
_PROPOSALS_PER_CHOICE = 4
# vLLM's sampler draws what replaces a rejected draft with the noise of the request's seed and the
# position. Drafts with the same noise would not be independent of it, so they have another seed.
_OTHER_SEED = 0x5DEECE66D1CE4E5


class PassProposals:
    """The part of a speculator that drafts by passes. It stands before one of vLLM's speculators
    among the bases of a class. Thread-safety: none."""

    # Of vLLM's speculator.
    vllm_config: Any
    speculative_config: Any
    device: torch.device
    max_num_reqs: int
    num_speculative_steps: int
    vocab_size: int
    use_local_argmax_reduction: bool
    block_tables: Any
    kv_cache_config: Any
    draft_logits: torch.Tensor | None
    draft_tokens: torch.Tensor
    seeds: torch.Tensor
    alone: str  # who drafts when passes have failed, for the log
    draws_guesses: bool  # with the noise of their places, as passes draw

    @property
    def max_model_len(self) -> int:
        """vLLM may lower it to what its caches hold, after the speculator was made."""
        return self.vllm_config.model_config.max_model_len

    @max_model_len.setter
    def max_model_len(self, _: int) -> None:
        """vLLM's constructor sets what the configuration says."""

    def _begin_life(self, vllm_config: Any) -> None:
        """After vLLM's own constructor."""
        self._engine: Engine = engine_of(vllm_config)
        self.limit = self.num_speculative_steps
        self.lengths: Lengths = self._engine.lengths
        self._guesses = self.lengths.guesses
        self._target: TargetModel | None = None
        self._loop: DraftLoop | None = None
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._rows: dict[str, int] = {}  # of the store, by request
        self._chosen_at: dict[str, int] = {}  # lengths at most, when they chose blocks
        self.draft_seeds = torch.zeros_like(self.seeds)  # of drafts by passes
        self._own_draft_logits()
        self.latest_passes = 0  # of the latest drafts; 0: guesses alone
        self._offered = False
        scheduler = getattr(vllm_config.scheduler_config, "scheduler_cls", None)
        self._plain_steps = chooses_lengths(scheduler)  # some steps want no drafts
        if not self._plain_steps:
            logger.warning(
                "nwor_specpv: every step verifies %d drafts, even where that is slower than plain "
                "steps; add --scheduler-cls "
                "nwor_specpv.vllm.specpv.scheduler.LongContextScheduler to let speed decide",
                self.limit,
            )

    def _own_draft_logits(self) -> None:
        """Memory for drafts that are drawn, if the setting and what is free allow it."""
        self.draws = False
        target = self.vllm_config.model_config.get_vocab_size()
        problem = ""
        if self.vocab_size != target:
            problem = f"the head has {self.vocab_size} logits and the target {target}"
        if self.use_local_argmax_reduction:
            problem = "use_local_argmax_reduction gathers no logits"
        shape = (self.max_num_reqs, self.limit, self.vocab_size)
        setting = self._engine.settings.specpv_draft_sampling
        self.draft_logits = own_logits(setting, self.draft_logits, shape, problem, self.device)
        self.top_k = torch.zeros_like(self.seeds, dtype=torch.int32)
        self.top_p = torch.ones_like(self.seeds, dtype=torch.float32)
        self.min_p = torch.zeros_like(self.top_p)

    @abstractmethod
    def make_head(self, chains: Chains) -> Head:
        """What guesses. Called when caches have memory."""

    @abstractmethod
    def graph_pool(self) -> Any:
        """The memory pool of captured graphs."""

    # ---- what the runner and our hooks call -----------------------------------------------------

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

    # ---- steps of a proposal --------------------------------------------------------------------

    def _decide(self) -> tuple[int, int]:
        """Drafts of each request, and passes that make them, as the scheduler wants them."""
        if not self._offered:  # the target's manager, too, as soon as its runner is known
            self._offered = True
            offer_larger_graphs(getattr(self._engine.runner, "cudagraph_manager", None))
        return self._engine.num_drafts, 0 if self.lengths.given_up else self._engine.num_passes

    def _choose_sampling(self, input_batch: Any, passes: int) -> None:
        """Drafts are drawn where a request of the step is sampled, else the likeliest. Passes alone
        ask for the limits of sampling."""
        self.draws = False
        if self.draft_logits is None:
            return
        states = versions.adapter.sampling_of(self._engine.runner)
        self.draws = bool((states.temperature.np[input_batch.idx_mapping_np] > 0).any())
        if self.draws and passes:
            for own, theirs in (
                (self.top_k, states.top_k),
                (self.top_p, states.top_p),
                (self.min_p, states.min_p),
            ):
                own.copy_(theirs.gpu)

    def _try_passes(
        self,
        input_batch: Any,
        passes: int,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> int:
        """Drafts by passes, if there are any: their number, 0 where they failed. Then drafts are
        token 0."""
        if passes:
            try:
                self._draft_by_passes(input_batch, passes, num_sampled, num_rejected, last_sampled)
            except Exception as error:
                self._fail(error)
                self.draft_tokens[: input_batch.num_reqs] = 0
                self._certain(input_batch.idx_mapping, 0)
                passes = 0
        self.latest_passes = passes
        return passes

    def _capture_passes(self, descs: Iterable[Any]) -> None:
        """Graphs of passes for the batches of vLLM's full graphs that verify drafts. Graphs of
        single rows are for steps without drafts. Views are not of the caches that vLLM tries graphs
        on: it takes those away again."""
        sizes = {desc.num_reqs for desc in descs if desc.uniform_token_count != 1}
        if not sizes or not self._possible() or self._engine.sizes_caches:
            return
        try:
            self._capture_loop(sorted(sizes, reverse=True))
        except Exception as error:
            self._fail_at_start(error)

    def _fail(self, error: Exception, reason: str = "") -> None:
        """Guesses are all there is from now on; serving goes on."""
        self.lengths.give_up()
        consequence = f"partial passes failed, so {self.alone} until the next start"
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
        if any((self._graph_kind(kind), padded) not in self._graphs for kind in kinds):
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
        loop.by_root = self.draws and self.draws_guesses
        if self.draws:
            torch.bitwise_xor(self.seeds, _OTHER_SEED, out=self.draft_seeds)
            if self.draws_guesses:  # there may be no more than these
                self._certain(input_batch.idx_mapping, passes + self._guesses)
                loop.chains.drafts[:, passes + self._guesses :] = 0
        return select

    def _graph_kind(self, kind: str) -> str:
        """Drawing is another graph than the likeliest tokens."""
        return f"drawn {kind}" if self.draws else kind

    def _run(self, kind: str, table: torch.Tensor) -> None:
        """A part of a proposal for as many requests as the table has; from its graph, if any."""
        graph = self._graphs.get((self._graph_kind(kind), table.shape[0]))
        if graph is not None:
            graph.replay()
        else:
            getattr(self._ready(), kind)(table)

    def _certain(self, requests: torch.Tensor, filled: int) -> None:
        """Drafts from the `filled`th on are token 0 with certainty: sampling must know.

        `requests` [B]: those of the proposal; drafts of others may still wait for their full step.
        """
        if self.draft_logits is not None and filled < self.limit:
            own = requests.to(torch.int32)
            nothing = torch.zeros(own.shape[0], self.limit, dtype=torch.int64, device=own.device)
            certain_logits(self.draft_logits, own, torch.full_like(own, filled), nothing)

    def _padded(self, count: int) -> int:
        first = self._graph_kind("first")
        sizes = [size for kind, size in self._graphs if kind == first and size >= count]
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
        caches = target.key_caches()
        rows = 1 + self._guesses
        store = ViewStore(
            settings.specpv(),
            caches,
            max_requests=settings.specpv_max_requests,
            max_batch=self.max_num_reqs,
            max_tokens=self.max_model_len,
            max_rows=rows + _PROPOSALS_PER_CHOICE * self.limit,
            key_scales=target.key_scales(),
            dtype=target.dtype,
        )
        tail = Tail(caches, self.max_num_reqs, self.limit + rows, target.dtype)
        chains = Chains(self.max_num_reqs, rows, self.limit, self.max_model_len, self.device)
        self._loop = DraftLoop(
            chains,
            store,
            tail,
            target.layer_index,
            SampledTarget(self, target),
            self.make_head(chains),
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
            for draws in (False, True) if self.draft_logits is not None else (False,):
                self.draws, loop.by_root = draws, draws and self.draws_guesses
                for size in sizes:
                    if draws and size != sizes[0] and size & (size - 1):
                        continue  # sampled batches have fewer sizes: graphs take time and memory
                    with agreed():
                        table = self._table(size)
                        loop.begin(table, nobody, nobody, nobody.bool(), nobody.long())
                    for kind in ("first", "kept", "later", "close"):
                        run = functools.partial(getattr(loop, kind), table)
                        run()
                        with agreed():
                            loop.check()
                            self._graphs[self._graph_kind(kind), size] = self._record(run)
                            loop.check()
        self.draws = loop.by_root = False
        logger.info(
            "nwor_specpv: captured CUDA graphs of partial passes for batches of %s", sizes[::-1]
        )

    def _record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.graph_pool()):
            run()
        return graph


def chooses_lengths(scheduler: Any) -> bool:
    """Whether vLLM's `scheduler_cls`, a class, its name or None, decides how many are drafted."""
    return str(getattr(scheduler, "__qualname__", scheduler)).endswith("LongContextScheduler")
