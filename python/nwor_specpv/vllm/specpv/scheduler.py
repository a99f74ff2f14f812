"""vLLM's schedulers for long contexts: --scheduler-cls nwor_specpv.vllm.specpv.scheduler.NAME

* LongContextScheduler, mode `lossless` on model runner V2: steps are plain, verify guesses, or
  verify drafts of partial passes, whichever has been fastest (see `arms`). It changes one number
  that vLLM's scheduler has for this purpose. It serves engines with and without asynchronous
  scheduling.
* RefreshScheduler, AsyncRefreshScheduler, mode `refresh` with prefix caching: the one without and
  the one with asynchronous scheduling. K/V of partial steps is given to nobody else.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from nwor_specpv.errors import logger
from nwor_specpv.vllm.hooks import speculators
from nwor_specpv.vllm.registry import find_engine
from nwor_specpv.vllm.settings import read_settings

from .decisions import Decisions
from .lengths import Lengths
from .publishing import CapsPublished
from .rules import HEADS


class LongContextScheduler(AsyncScheduler):
    """Decides before each step what drafts the next one has. Thread-safety: none.

    Only our speculators follow it; with another, and without one, it is vLLM's scheduler.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wanted = self.num_spec_tokens  # drafts, of the latest step
        self.decisions: Decisions | None = None
        if speculators.wanted(self.vllm_config):
            settings = read_settings(self.vllm_config.additional_config)
            lookups = self.vllm_config.speculative_config.method not in HEADS
            self.decisions = Decisions(Lengths(settings, self.num_spec_tokens), lookups=lookups)
        else:
            logger.warning(
                "nwor_specpv: --scheduler-cls %s has no effect: it is for mode 'lossless' on "
                "model runner V2, with method 'ngram_gpu' or an EAGLE head",
                type(self).__name__,
            )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Without asynchronous scheduling, after each step: vLLM's runner reports as many drafts as
        there is room for, whether they were made or not."""
        if self.decisions is not None:
            made = [tokens[: self._wanted] for tokens in draft_token_ids.draft_token_ids]
            draft_token_ids = DraftTokenIds(draft_token_ids.req_ids, made)
        super().update_draft_token_ids(draft_token_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """What a step has yielded is known here, on the host, for any number of ranks."""
        if self.decisions is not None:
            sampled = model_runner_output.sampled_token_ids or ()
            self.decisions.finish(scheduler_output, sampled, time.perf_counter())
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self.decisions is not None:
            engine = find_engine(self.vllm_config)
            if engine is not None and engine.lengths is not None and engine.lengths.given_up:
                self.decisions.fail_passes()
            arm = self.decisions.decide(scheduler_output, self.requests, time.perf_counter())
            self._wanted = arm.drafts
        super()._update_after_schedule(scheduler_output)


class RefreshScheduler(CapsPublished, Scheduler):
    """vLLM's scheduler."""


class AsyncRefreshScheduler(CapsPublished, AsyncScheduler):
    """vLLM's asynchronous scheduler."""

    asynchronous = True
