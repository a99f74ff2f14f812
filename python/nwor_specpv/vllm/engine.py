"""One vLLM engine in this process: its interceptor, the round of each step, the commit.

A step is: `begin` when the attention metadata is built, `write` per layer as the model runs,
`finish` when the runner knows what was accepted. Steps end in `finish` or are aborted by the next
`begin` (an exception in the model, a request that vanished, a graph capture).

Thread-safety: none; a vLLM worker runs its steps from one thread.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nwor_specpv import (
    COMMIT_ERRORS,
    ContractChecker,
    Interceptor,
    Metrics,
    RoundPlan,
    cache_views,
    write_kv,
)
from nwor_specpv.errors import NworError, logger

from . import compat, rows, runner_hooks, speculators, support
from .settings import read_settings
from .specpv import rules as long_context
from .specpv.lengths import Lengths, head_drafts
from .specpv.refresh import Refresh

# Path entries that one commit may have (see docs/commit.md).
MAX_COMMIT_ENTRIES = 8192
# vLLM's tag of the model that verifies; drafters are built under other tags.
TARGET_MODEL = "backbone"
# The value of `agreement_group` that means this engine's tensor-parallel ranks.
TENSOR_PARALLEL = "tp"


@dataclass
class Step:
    """An open round and what the commit needs to know of it."""

    plan: RoundPlan
    staged: bool
    capture: bool
    num_drafts: torch.Tensor  # [B] int32 on the caches' device
    path: torch.Tensor  # [B, depth] int32: rows of the request, the first that may be accepted on
    joined: set[int] = field(default_factory=set)  # groups whose metadata was built
    slots: dict[int, torch.Tensor] = field(default_factory=dict)  # by group, [T]
    num_writes: int = 0  # layers written by Python, none when a graph was replayed
    may_defer: bool = False  # nothing reads the step's rows from the cache


@dataclass(frozen=True)
class StepSeen:
    """What the metadata of the latest step says of its requests, in their order."""

    lens: list[int]  # rows
    drafts: list[int]  # of them
    block_table: torch.Tensor  # [B, pages] int32


class Engine:
    """Staging for one VllmConfig. `off` says why there is none."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = weakref.ref(vllm_config)
        self.layers = vllm_config.compilation_config.static_forward_context
        self.settings = read_settings(vllm_config.additional_config)
        self.setup = support.describe(vllm_config)
        self.off = self._judge()
        if self.settings.enable_specpv:
            long_context.judge(self.settings, long_context.describe(vllm_config), self.off)
        self.seen: StepSeen | None = None
        self.names: Sequence[str] = ()  # of a step's requests, in their order (runner V2)
        self.num_drafts = 0  # that the scheduler wants for the next step (runner V2)
        self.refresh = self._make_refresh(vllm_config)
        self.lengths = self._make_lengths(vllm_config)
        self.interceptor: Interceptor | None = None
        self.checker: ContractChecker | None = None
        self.violations: list[str] = []
        self.num_replays = 0  # steps whose writes a CUDA graph did
        self._groups: list[list[str]] = []  # layers that are ours, by group
        self._bound: dict[str, int] = {}  # layer -> address of its cache
        self._runner: Callable[[], Any] = lambda: None
        self._step: Step | None = None
        self._rows: tuple[Any, torch.Tensor, torch.Tensor] | None = None  # of the last step
        self._mail = StatusMail()
        self._dtype = vllm_config.model_config.dtype  # of K and V before a cache quantises them
        self._max_requests = vllm_config.scheduler_config.max_num_seqs
        self._max_graph_rows = vllm_config.compilation_config.max_cudagraph_capture_size or 0

    def _judge(self) -> str | None:
        """Why staging is off for this engine; with `strict`, anything but a choice is an error."""
        if not self.settings.enable_nwor:
            return "switched off by enable_nwor"
        if self.setup.speculation is None:
            return "no speculation is configured"
        problems = [str(refusal) for refusal in support.refusals(self.setup)]
        hook_problem = runner_hooks.install()
        if hook_problem is not None:
            problems.append(f"{hook_problem}; install {' or '.join(compat.SUPPORTED)}")
        if not problems:
            logger.info("nwor_specpv: drafts of %s are staged", self.setup.speculation)
            return None
        text = " | ".join(problems)
        if self.settings.strict:
            raise NworError(f"nwor_specpv: {text}")
        logger.warning("nwor_specpv is off: %s", text)
        return text

    # ---- set-up ---------------------------------------------------------------------------------

    def _make_refresh(self, vllm_config: Any) -> Refresh | None:
        """Mode `refresh`, if it was asked for."""
        if not self.settings.enable_specpv or self.settings.specpv_rectify != long_context.REFRESH:
            return None
        problem = runner_hooks.install_names() if vllm_config.use_v2_model_runner else None
        if problem is not None:
            raise NworError(f"nwor_specpv, enable_specpv: {problem}")
        logger.warning(
            "nwor_specpv: mode 'refresh' is NOT lossless: verify steps attend to a partial view, "
            "tokens may differ from vLLM's own"
        )
        return Refresh(self, vllm_config)

    def _make_lengths(self, vllm_config: Any) -> Lengths | None:
        """How long rounds are, in mode `lossless` with a head (runner V2)."""
        lossless = self.settings.specpv_rectify == long_context.LOSSLESS
        if not self.settings.enable_specpv or not lossless or not vllm_config.use_v2_model_runner:
            return None
        problem = runner_hooks.install_names() or speculators.problem
        if problem is not None:
            raise NworError(f"nwor_specpv, enable_specpv: {problem}")
        alone = vllm_config.parallel_config.world_size == 1
        return Lengths(self.settings, self.setup.num_speculative_tokens, alone=alone)

    @property
    def uniform_rows(self) -> tuple[int, ...]:
        """Rows that every request of a batch in a full CUDA graph may have."""
        most = self.setup.num_speculative_tokens
        if self.lengths is None:
            return (1 + most,)
        return (1 + most, 1 + head_drafts(self.settings, most))

    def add_group(self, layer_names: Sequence[str]) -> int:
        """Registers layers that share one slot mapping; the same layers are the same group."""
        names = list(layer_names)
        if names in self._groups:
            return self._groups.index(names)
        if self._groups and self.settings.enable_specpv:
            raise NworError(
                "nwor_specpv, enable_specpv: layers in different cache groups "
                f"({self._groups[0][0]} and {names[0]}), and a view is one list of blocks; serve "
                "this model without enable_specpv"
            )
        if self.settings.enable_specpv:
            long_context.judge_layers({name: self.layers.get(name) for name in names})
        self._groups.append(names)
        return len(self._groups) - 1

    def attach(self, runner: Any) -> None:
        """Tells which model runner drives this engine: it knows the scheduler's drafts."""
        if self._runner() is not runner:
            self._runner = weakref.ref(runner)

    @property
    def runner(self) -> Any:
        return self._runner()

    @property
    def own_layers(self) -> list[str]:
        """Names of the layers whose caches are bound."""
        return list(self._bound)

    def request_names(self) -> Sequence[str]:
        """Names of the step's requests in their order; none before the first tokens."""
        runner = self._runner()
        return self.names if runner is None or self.names else runner.input_batch.req_ids

    def drafts(self, lens: Sequence[int], common: Any) -> list[int]:
        """Draft rows of each request; none until the first tokens were sampled."""
        runner = self._runner()
        if runner is None:
            return [0] * len(lens)
        if hasattr(runner, "input_batch"):  # V1 keeps the scheduler's drafts there
            return rows.drafts_of_batch(lens, runner.input_batch.spec_token_ids)
        prefilling = common.is_prefilling.tolist()
        return rows.drafts_of_decodes(lens, prefilling + [True] * (len(lens) - len(prefilling)))

    def _bind(self, device: torch.device) -> Interceptor:
        """Binds every layer whose cache is new. REQUIRES: no open round."""
        if self.interceptor is None:
            self.interceptor = self._make_interceptor(device)
        for group, names in enumerate(self._groups):
            for name in names:
                cache = self.layers[name].kv_cache
                if self._bound.get(name) != cache.data_ptr():
                    caches, scales = views_of(self.layers[name])
                    dtype = self._dtype if scales else None
                    self.interceptor.bind_layer(name, *caches, group, *scales, dtype=dtype)
                    self._bound[name] = cache.data_ptr()
        if self.settings.check_contract and self.checker is None:
            self._watch()
        return self.interceptor

    def _watch(self) -> None:
        """Sets the contract checker on the caches, if each layer has memory of its own."""
        if len(set(self._bound.values())) < len(self._bound):
            # vLLM lets layers of different groups share memory, block by block; the checker would
            # take one layer's writes for damage to another.
            logger.warning("nwor_specpv: check_contract is off, layers share cache memory")
            self.settings = dataclasses.replace(self.settings, check_contract=False)
            return
        self.checker = ContractChecker(self.interceptor)

    def _make_interceptor(self, device: torch.device) -> Interceptor:
        config = self.settings.nwor()
        if device.type == "cuda":
            config.graph_rows = max(1, self._max_graph_rows)
            most = self._max_requests * self.setup.num_speculative_tokens
            config.staging_rows = max(config.staging_rows, most)
        if config.agreement_group == TENSOR_PARALLEL:
            from vllm.distributed.parallel_state import get_tp_group

            config.agreement_group = get_tp_group().device_group.group_name
        interceptor = Interceptor(config)
        from vllm.distributed.parallel_state import get_world_group

        rank = {"LOCAL_RANK": str(get_world_group().local_rank)}
        Metrics().serve_settings(self.settings, rank)
        return interceptor

    # ---- the step -------------------------------------------------------------------------------

    def begin(
        self,
        group: int,
        lens: list[int],
        drafts: list[int],
        slot_mapping: torch.Tensor,
        capture: bool = False,
        may_defer: bool = False,
    ) -> None:
        """Opens the round of a step, or joins it where the engine has several cache groups.

        With `capture` the step is only recorded into a CUDA graph; the next one ends it. With
        `may_defer` no row of the step is read from the cache, so layers may write late.
        """
        step = self._step
        if (
            step is not None
            and group not in step.joined
            and step.capture is capture
            and lens == list(step.plan.query_lens)
        ):
            step.joined.add(group)
            step.slots[group] = slot_mapping
            return
        self.abort()
        interceptor = self._bind(slot_mapping.device)
        if self.checker is not None and not capture:
            self.checker.snapshot()
        plan = RoundPlan(lens, drafts)
        staged = interceptor.begin(plan, capture).stage
        counts, path = self._rows_on_device(lens, drafts, slot_mapping.device)
        self._step = Step(plan, staged, capture, counts, path, {group}, {group: slot_mapping})
        self._step.may_defer = may_defer and self.checker is None

    def _rows_on_device(
        self, lens: list[int], drafts: list[int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of drafts and their rows; steps like the last one share what it had."""
        key = (lens, drafts, device)
        if self._rows is None or self._rows[0] != key:
            self._rows = (key, *_on_device(*rows.draft_rows(lens, drafts), device))
        return self._rows[1:]

    def write(
        self,
        layer: str,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        defer: bool = False,
    ) -> bool:
        """Routes one layer's rows; False: the caller writes them itself.

        With `defer` the layer's attention does the write (`merge_rows_of_layer`), where it may.
        """
        if self._step is None or self.interceptor is None or layer not in self._bound:
            return False
        self._step.num_writes += 1
        num_rows = slot_mapping.shape[0]
        outcome = self.interceptor.write(
            layer,
            key[:num_rows],
            value[:num_rows],
            slot_mapping,
            defer=defer and self._step.may_defer,
        )
        return outcome.action != "bypass" or outcome.reason == "stale_round"

    def finish(self, accepted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Commits what was accepted. `accepted` gives the counts [B] for the numbers of drafts."""
        if self.refresh is not None:
            self.refresh.finish()
        step, self._step = self._step, None
        if step is None or self.interceptor is None:
            return
        if step.capture:
            self.interceptor.abort()
            return
        if not step.staged and self.checker is None:
            self._close(step)
            return
        counts = accepted(step.num_drafts)
        if counts.shape != step.num_drafts.shape:
            self.interceptor.abort()
            raise NworError(
                f"accepted tokens: got {counts.shape[0]} requests, expected the "
                f"{step.num_drafts.shape[0]} of the step"
            )
        if self.checker is not None:
            self._note(self.checker.verify_staged())
        try:
            self._note_replay(step)
            receipt = self._commit(step, counts)
        except Exception as error:
            logger.exception("nwor_specpv: the commit failed")
            try:
                self._rescue(step, counts, f"{type(error).__name__}: {error}")
            finally:
                self.interceptor.abort()
            return
        if counts.is_cuda and self.checker is None:
            self._post(receipt)
            return
        if not receipt.ok:
            self._rescue(step, counts, receipt.problem)
        elif self.checker is not None:
            self._note(self.checker.verify(receipt, counts.tolist()))

    def _post(self, receipt: Any) -> None:
        """Sends for a commit's status; a fault in the last one's is counted and raised."""
        assert self.interceptor is not None
        try:
            self._mail.post(receipt)
        except NworError as error:
            self.interceptor.report_bypass("commit_lost", str(error))
            raise

    def _close(self, step: Step) -> None:
        """Ends a step that staged nothing: all its rows are in the cache."""
        assert self.interceptor is not None
        try:
            self._note_replay(step)
            self.interceptor.commit(step.path, step.num_drafts)
        except Exception:
            logger.exception("nwor_specpv: a step without staged drafts could not be closed")
            self.interceptor.abort()

    def _note_replay(self, step: Step) -> None:
        """Tells the interceptor of writes that a CUDA graph did: no layer has called us."""
        if step.num_writes == 0 and step.num_drafts.is_cuda and self.interceptor is not None:
            self.interceptor.note_replay()
            self.num_replays += 1

    def abort(self) -> None:
        """Gives up the open step, if there is one: nothing of its drafts is written."""
        if self._step is not None and self.interceptor is not None:
            self._step = None
            self.interceptor.abort()

    def _commit(self, step: Step, counts: torch.Tensor) -> Any:
        assert self.interceptor is not None
        depth = step.path.shape[1]
        chunks = rows.chunk_depths(len(step.plan.query_lens), depth, MAX_COMMIT_ENTRIES)
        if len(chunks) == 1:  # every launch here is felt in a short step
            return self.interceptor.commit(step.path, counts, rows="request")
        for begin, end in chunks:
            part = (counts - begin).clamp(0, end - begin)
            receipt = self.interceptor.commit(
                step.path[:, begin:end].contiguous(), part, rows="request", last=end == depth
            )
        return receipt

    def _rescue(self, step: Step, counts: torch.Tensor, problem: str) -> None:
        """Writes the accepted rows from staging, which a failed commit leaves as it was.

        If that fails too its exception ends the step, and with it the requests: a token that was
        emitted must not be missing from the cache.
        """
        assert self.interceptor is not None
        if not step.staged:
            return
        logger.error("nwor_specpv: accepted rows are written one by one: %s", problem)
        try:
            self._write_accepted(step, counts)
        except Exception as error:
            self.interceptor.report_bypass("commit_lost", f"{type(error).__name__}: {error}")
            raise
        self.interceptor.report_bypass("commit_failure", problem)

    def _write_accepted(self, step: Step, counts: torch.Tensor) -> None:
        assert self.interceptor is not None
        path = rows.accepted_path(step.path, counts)
        starts = torch.tensor([0, *step.plan.query_lens], device=path.device).cumsum(0)[:-1]
        batch_rows = (path + starts[:, None])[path >= 0].long()
        stage_rows = torch.tensor(self.interceptor.stage_rows(), device=path.device)
        chosen = stage_rows[batch_rows].long()
        for group, slots in step.slots.items():
            keys, values = self.interceptor.staged(group)
            destinations = slots[batch_rows]
            for layer, name in enumerate(self._groups[group]):
                caches, scales = views_of(self.layers[name])
                chosen_rows = keys[layer][chosen], values[layer][chosen]
                write_direct(caches, *chosen_rows, destinations, *scales)

    def _note(self, violations: Sequence[Any]) -> None:
        for violation in violations:
            self.violations.append(repr(violation))
            logger.error("nwor_specpv: contract broken: %r", violation)
        if violations and self.settings.strict:
            raise NworError(f"contract: {violations[0]!r}")


class StatusMail:
    """Status words of commits on a GPU, read when they have arrived: nobody waits for them.

    A fault there means that emitted tokens are missing from the cache. By the time it is known the
    next step has used the staging, so all that is left is to say so and end.
    """

    def __init__(self) -> None:
        self._words: torch.Tensor | None = None
        self._status: torch.Tensor | None = None  # on its way; None: nothing is
        self._committed: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        self._aside: torch.cuda.Stream | None = None  # a copy would hold up the step's kernels

    def post(self, receipt: Any) -> None:
        """Sends for the status of this commit, after looking at the last one's."""
        self.check()
        if self._status is not None:  # the last one is still on its way: it is waited for here
            self._arrived.synchronize()
            self.check()
        if self._words is None:
            self._words = torch.zeros(8, dtype=torch.int64, pin_memory=True)
            self._committed, self._arrived = torch.cuda.Event(), torch.cuda.Event()
            self._aside = torch.cuda.Stream(receipt.status.device)
        self._status = receipt.status
        self._committed.record()
        with torch.cuda.stream(self._aside):
            self._committed.wait()
            self._words.copy_(self._status, non_blocking=True)
            self._arrived.record()

    def check(self) -> None:
        if self._status is None or self._words is None or not self._arrived.query():
            return
        self._status = None
        code, request, index, value = self._words[:4].tolist()
        if code != 0:
            raise NworError(
                f"commit: got {COMMIT_ERRORS[code]} for request {request}, index {index}, value "
                f"{value}, expected every accepted row to be written"
            )


def _on_device(
    counts: list[int], path: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of drafts [B] and their rows [B, depth] on the device: one copy, no waiting."""
    flat = counts + [row for request in path for row in request]
    host = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
    both = host.to(device, non_blocking=True)
    depth = len(path[0]) if path else 1
    return both[: len(counts)], both[len(counts) :].view(len(counts), depth)


def views_of(
    layer: Any,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
    """K and V of a layer's cache; of a quantised one also the scales of both."""
    cache = layer.kv_cache
    if cache.dtype != torch.uint8:
        return cache_views(cache, compat.CACHE_LAYOUT), ()
    codes = cache_views(cache.view(torch.float8_e4m3fn), compat.CACHE_LAYOUT)
    return codes, (layer._k_scale, layer._v_scale)


def write_direct(
    caches: tuple[torch.Tensor, torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *scales: torch.Tensor,
) -> None:
    """Writes rows to their slots as an engine without staging would."""
    nowhere = torch.full(slots.shape, -1, dtype=torch.int32, device=slots.device)
    write_kv(key, value, *caches, slots, nowhere, key[:0], value[:0], *scales)


# Engines that may still run, the newest last. Layers keep theirs alive; the newest is kept here,
# too, for those who ask for it between steps.
_engines: list[weakref.ref[Engine]] = []
_current: Engine | None = None


def engine_of(vllm_config: Any) -> Engine:
    """The engine of this configuration, made at the first asking."""
    global _current
    found = find_engine(vllm_config)
    if found is None:
        found = _current = Engine(vllm_config)
        _engines[:] = [known for known in _engines if known() is not None]
        _engines.append(weakref.ref(found))
    return found


def find_engine(vllm_config: Any) -> Engine | None:
    """The engine of this configuration, if it was asked for before."""
    context = vllm_config.compilation_config.static_forward_context
    known = (engine() for engine in reversed(_engines))
    return next((e for e in known if e is not None and e.layers is context), None)


def current_engine() -> Engine | None:
    """The newest engine of this process."""
    return _current
