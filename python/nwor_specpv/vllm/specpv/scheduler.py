"""vLLM's schedulers for long contexts: --scheduler-cls nwor_specpv.vllm.specpv.scheduler.NAME

* LongContextScheduler, mode `lossless` on model runner V2: steps are plain, verify guesses, or
  verify drafts of partial passes, whichever has been fastest (see `arms`).
* RefreshScheduler, AsyncRefreshScheduler, mode `refresh` with prefix caching: the one without and
  the one with asynchronous scheduling. K/V of partial steps is given to nobody else.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from nwor_specpv.vllm.hooks import speculators
from nwor_specpv.vllm.registry import find_engine
from nwor_specpv.vllm.scheduling.scheduler import ChoosingScheduler
from nwor_specpv.vllm.settings import read_settings

from .decisions import LongContextDecisions
from .lengths import Lengths, match_lengths
from .publishing import CapsPublished
from .rules import HEADS


class LongContextScheduler(ChoosingScheduler):
    """Only our speculators follow it. Thread-safety: none."""

    purpose = "mode 'lossless' on model runner V2, with method 'ngram_gpu' or an EAGLE head"
    decisions: LongContextDecisions | None

    def make_decisions(self) -> LongContextDecisions | None:
        """See the base class."""
        if not speculators.wanted(self.vllm_config):
            return None
        settings = read_settings(self.vllm_config.additional_config)
        speculation = self.vllm_config.speculative_config
        matches = None if speculation.method in HEADS else match_lengths(speculation)
        return LongContextDecisions(Lengths(settings, self.num_spec_tokens), matches=matches)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        found = super().update_from_output(scheduler_output, model_runner_output)
        if self.decisions is not None and self.decisions.scouts is not None:
            self.decisions.scouts.look(scheduler_output.num_scheduled_tokens, self.requests)
        return found

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        engine = find_engine(self.vllm_config)
        lengths = engine.lengths if engine is not None else None
        if self.decisions is not None and lengths is not None and lengths.given_up:
            self.decisions.fail_passes()
        super()._update_after_schedule(scheduler_output)


class RefreshScheduler(CapsPublished, Scheduler):
    """vLLM's scheduler."""


class AsyncRefreshScheduler(CapsPublished, AsyncScheduler):
    """vLLM's asynchronous scheduler."""

    asynchronous = True
