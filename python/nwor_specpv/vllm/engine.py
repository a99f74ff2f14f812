"""One vLLM engine in this process: what was asked of it, whether it stages, who drives it.

Its caches and interceptor are in `staging`, the round of each step in `steps`.

Thread-safety: none; a vLLM worker runs its steps from one thread.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwor_specpv import _C, ContractChecker, Interceptor
from nwor_specpv.config import MOST_VIEWS, Settings
from nwor_specpv.errors import NworError, logger

from . import draft_rows, registry, support, versions
from .faults import Faults
from .hooks import graph_lengths, prefix_hits, recovery, speculators, trees
from .hooks import runner as runner_hooks
from .settings import read_settings
from .specpv import memory
from .specpv import rules as long_context
from .specpv.failures import DraftFailures
from .specpv.lengths import Lengths
from .specpv.refresh import Refresh
from .staging import Staging
from .steps import Steps, TreePaths
from .tree import rules as tree_rules
from .tree.shape import arms_of_batch, rows_of_step, shape_of
from .tree.store import TreeStore

# vLLM's tags of the model that verifies, and of EAGLE and MTP heads; other drafters have others.
TARGET_MODEL = "backbone"
HEAD_MODEL = "eagle_head"


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
        self.settings = _with_views(read_settings(vllm_config.additional_config), vllm_config)
        self.setup = support.describe(vllm_config)
        self.off = self._judge()
        self._has_views = False
        if self.settings.enable_specpv:
            self._has_views = self._judge_long_context(long_context.describe(vllm_config))
        mode = self.settings.specpv_mode if self.settings.enable_specpv else None
        self.lossless = mode == long_context.LOSSLESS  # drafts come from views
        worker_class = vllm_config.parallel_config.worker_cls
        if self.lossless:
            self._hook(runner_hooks.install_start(worker_class))
        if self.settings.enable_specpv and vllm_config.device_config.device_type == "cuda":
            self._hook(runner_hooks.install_memory(worker_class))
        self.seen: StepSeen | None = None
        self.names: Sequence[str] = ()  # of a step's requests, in their order (runner V2)
        self.scheduled_drafts: Sequence[int] | None = None  # of each, where vLLM says so
        # What the scheduler wants for the next step (runner V2): drafts, and passes to make them.
        self.num_drafts = self.num_passes = 0
        self.plain_step = False  # this step has no drafts and makes none (runner V2)
        self.prefix_hits = False  # a request may read what another one of the step computes
        self.sizes_caches = False  # vLLM looks how large they may be
        self.refresh = self._make_refresh(vllm_config)
        self.tree_room = 0  # rows of a step; 0: their number is fixed
        self.trees = self._make_trees(vllm_config)
        self.lengths = self._make_lengths(vllm_config)
        single_rank = vllm_config.parallel_config.world_size == 1
        self.draft_failures = DraftFailures(single_rank=single_rank)
        self.draft_lengths = self._list_lengths()
        most = self.setup.num_speculative_tokens
        rank = 0 if single_rank else _rank()
        self.faults = Faults(recovers=support.recovers(vllm_config), rank=rank)
        drafts = self.tree_room or vllm_config.scheduler_config.max_num_seqs * most
        self.staging = Staging(self.layers, self.settings, vllm_config, drafts, self.faults)
        self.steps = Steps(self.staging, self.faults)
        self._runner: Callable[[], Any] = lambda: None
        if self.off is None:
            route = self.settings.attention_route or "auto"
            trees = self.trees and ("trees by speed" if self.tree_room else "trees")
            _C.describe_engine(self.setup.speculation, most, mode or trees or "full", route)
            self.staging.serve_metrics()  # now, so that a scrape before the first request finds it

    # ---- set-up ---------------------------------------------------------------------------------

    def _judge(self) -> str | None:
        """Why staging is off for this engine; with `strict`, anything but a choice is an error."""
        if not self.settings.enable_nwor:
            return "switched off by enable_nwor"
        if self.setup.speculation is None:
            return "no speculation is configured"
        problems = [str(refusal) for refusal in support.refusals(self.setup)]
        hook_problem = (
            runner_hooks.install()
            or runner_hooks.install_plan()
            or prefix_hits.install()
            or recovery.install()
        )
        if hook_problem is not None:
            problems.append(f"{hook_problem}; install vLLM {versions.supported()}")
        if not problems:
            logger.info("nwor_specpv: staging the drafts of method %s", self.setup.speculation)
            return None
        text = " | ".join(problems)
        if self.settings.strict:
            raise NworError(f"nwor_specpv: {text}")
        logger.warning("nwor_specpv is off: %s", text)
        return text

    def _judge_long_context(self, setup: long_context.LongContext) -> bool:
        """Whether there are views."""
        long_context.judge(self.settings, setup, self.off)
        alone = long_context.has_guesses_alone(self.settings, setup)
        if alone:
            logger.warning(
                "nwor_specpv: no request can be longer than a view, with --max-model-len %d: there "
                "are no partial passes, and guesses draft alone where that is faster",
                setup.max_model_len,
            )
        return not alone

    @staticmethod
    def _hook(problem: str | None) -> None:
        """What long contexts need of vLLM is there, or this is why not."""
        if problem is not None:
            raise NworError(
                f"nwor_specpv, enable_specpv: {problem}; install vLLM {versions.supported()}"
            )

    def _make_refresh(self, vllm_config: Any) -> Refresh | None:
        """Mode `refresh`, if it was asked for."""
        if not self.settings.enable_specpv or self.settings.specpv_mode != long_context.REFRESH:
            return None
        if vllm_config.use_v2_model_runner:
            self._hook(runner_hooks.install_plan())
        logger.warning(
            "nwor_specpv: mode 'refresh' is NOT lossless: verify steps attend to a partial view "
            "and tokens may differ from vLLM's own; use specpv_mode 'lossless' if they must not"
        )
        return Refresh(self, vllm_config)

    def _make_trees(self, vllm_config: Any) -> TreeStore | None:
        """Draft trees, if they were asked for."""
        if self.settings.draft_tree == "off":
            return None
        setup = tree_rules.describe(vllm_config)
        tree_rules.judge(self.settings, setup, self.off)
        problem = trees.install() or speculators.problem
        if problem is None and self.settings.draft_tree == "auto":
            problem = graph_lengths.install()
        if problem is not None:
            raise NworError(
                f"nwor_specpv, draft_tree: {problem}; install vLLM {versions.supported()}"
            )
        shape = shape_of(1 + setup.num_drafts)
        if self.settings.draft_tree == "auto":
            room = tree_rules.room_of_step(self.settings, setup)
            self.tree_room = rows_of_step(setup.max_requests, room)
            logger.info(
                "nwor_specpv: steps verify draft trees of up to %d rows or none, by measured "
                "speed; a step has up to %d rows",
                shape.rows,
                self.tree_room,
            )
        else:
            logger.info("nwor_specpv: steps verify draft trees of %d rows", shape.rows)
        device = vllm_config.device_config.device
        return TreeStore(shape, setup.max_requests, setup.max_tokens, device)

    def _make_lengths(self, vllm_config: Any) -> Lengths | None:
        """How many drafts and passes are possible in mode `lossless` on runner V2."""
        if not self.lossless or not vllm_config.use_v2_model_runner:
            return None
        problem = runner_hooks.install_plan() or runner_hooks.install_idle()
        self._hook(problem or graph_lengths.install() or speculators.problem)
        return Lengths(self.settings, self.setup.num_speculative_tokens)

    def _list_lengths(self) -> tuple[int, ...]:
        """Numbers of drafts that our scheduler may choose; none: it does not choose."""
        if self.lengths is not None:
            return self.lengths.drafts
        if not self.tree_room:
            return ()
        return (0, *(rows - 1 for rows in arms_of_batch(1, self.tree_room)))

    @property
    def uniform_rows(self) -> tuple[int, ...]:
        """Rows that every request of a batch in a full CUDA graph may have, but for single rows:
        without drafts there is nothing to verify.
        """
        most = self.setup.num_speculative_tokens
        drafts = [most, *self.setup.drafts_by_batch_size, *self.draft_lengths]
        return tuple(1 + number for number in dict.fromkeys(drafts) if number)

    @property
    def leaves_single_rows(self) -> bool:
        """Whether steps of single rows, which have no drafts, are vLLM's alone. Mode `refresh` and
        drafters on runner V1 look at their requests, a contract checker at what they write."""
        looks = self.refresh is not None or (self.lossless and self.lengths is None)
        return not looks and self.staging.writes_single_rows((), ())

    def add_group(self, layer_names: Sequence[str]) -> int:
        """Registers layers that share one slot mapping; the same layers are the same group.

        When they come again vLLM is about to make other caches: it had tried graphs on small ones.
        """
        names = list(layer_names)
        groups = self.staging.groups
        if names in groups:
            self._forget_caches()
            return groups.index(names)
        if groups and self.settings.enable_specpv:
            raise NworError(
                f"nwor_specpv, enable_specpv: {groups[0][0]} and {names[0]} are in different KV "
                "cache groups, but a view is one list of blocks for all layers; serve this model "
                "without enable_specpv"
            )
        if self.settings.enable_specpv:
            long_context.judge_layers({name: self.layers.get(name) for name in names})
        if self.trees is not None:
            tree_rules.judge_layers({name: self.layers.get(name) for name in names})
        groups.append(names)
        return len(groups) - 1

    def _forget_caches(self) -> None:
        """Lets go of them, so that their memory is there for the ones to come."""
        self.steps.abort()
        self.staging.release()
        if self.refresh is not None:
            self.refresh.views = None

    def attach(self, runner: Any) -> None:
        """Tells which model runner drives this engine: it knows the scheduler's drafts."""
        if self._runner() is not runner:
            self._runner = weakref.ref(runner)

    @property
    def runner(self) -> Any:
        return self._runner()

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
            return draft_rows.drafts_of_batch(lens, runner.input_batch.spec_token_ids)
        prefilling = common.is_prefilling.tolist()
        return draft_rows.drafts_of_decodes(
            lens, prefilling + [True] * (len(lens) - len(prefilling)), self.scheduled_drafts
        )

    def prefilling(
        self, names: Sequence[str], ends: Sequence[int], drafts: Sequence[int], common: Any
    ) -> list[bool]:
        """Whether a request's rows, up to `ends`, are of its prompt, or of tokens that vLLM
        computes again after a preemption. Known on the host.
        """
        found = common.is_prefilling[: len(names)].tolist()  # V1: by the prompt's length alone
        requests = getattr(self._runner(), "requests", None)
        if requests is None:  # V2 counts what is computed again, too
            return found
        computed = [end - number for end, number in zip(ends, drafts, strict=True)]
        return [
            busy or end < requests[name].num_tokens  # all but its last token
            for name, end, busy in zip(names, computed, found, strict=False)
        ]

    def left_for_caches(self, available: int) -> int:
        """What caches may take of so many bytes on this rank."""
        vllm_config = self.vllm_config()
        if not self._has_views or vllm_config is None:
            return available
        return memory.describe(self.settings, vllm_config).left_for_caches(available)

    # ---- the step -------------------------------------------------------------------------------

    def finish(self, accepted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Ends the step: `accepted` gives the counts [B] for the numbers of drafts [B]."""
        if self.refresh is not None:
            self.refresh.finish()
        self.steps.finish(accepted, self._tree_paths())

    def _tree_paths(self) -> TreePaths | None:
        """The rows that were accepted in a step with trees."""
        step = self.trees.step if self.trees is not None else None
        if step is None or step.path is None:
            return None
        depth = min(self.trees.shape.depth, step.path.shape[1] - 1)
        return TreePaths(step.path[:, :depth].contiguous(), step.slot_places(depth))

    # ---- what there is to see -------------------------------------------------------------------

    @property
    def own_layers(self) -> list[str]:
        """Names of the layers whose caches are bound."""
        return list(self.staging.bound)

    @property
    def interceptor(self) -> Interceptor | None:
        """None: no step has been begun yet."""
        return self.staging.interceptor

    @property
    def checker(self) -> ContractChecker | None:
        return self.staging.checker

    @property
    def violations(self) -> list[str]:
        """What the contract checker has found."""
        return self.staging.violations

    @property
    def num_replays(self) -> int:
        """Steps whose writes a CUDA graph did."""
        return self.steps.num_replays


def _with_views(settings: Settings, vllm_config: Any) -> Settings:
    """With a number of requests that have views: all, unless the user has said fewer."""
    if not settings.enable_specpv or settings.specpv_max_requests:
        return settings
    number = min(vllm_config.scheduler_config.max_num_seqs, MOST_VIEWS)
    return dataclasses.replace(settings, specpv_max_requests=number)


def _rank() -> int:
    """Among the tensor-parallel ranks, the first of which vLLM listens to."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().rank_in_group


def engine_of(vllm_config: Any) -> Engine:
    """The engine of this configuration, made at the first asking."""
    found = registry.find_engine(vllm_config)
    if found is None:
        found = Engine(vllm_config)
        registry.add_engine(found)
    return found
