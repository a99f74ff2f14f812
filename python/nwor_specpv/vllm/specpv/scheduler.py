"""vLLM's schedulers for long contexts: --scheduler-cls nwor_specpv.vllm.specpv.scheduler.NAME

* LongContextScheduler, mode `lossless` with a head: requests in short contexts verify the head's
  few drafts, as in vLLM; where partial passes pay, they verify long chains. It changes
  one number that vLLM's scheduler has for this purpose. It serves engines with and without
  asynchronous scheduling.
* RefreshScheduler, AsyncRefreshScheduler, mode `refresh` with prefix caching: the one without and
  the one with asynchronous scheduling. K/V of partial steps is given to nobody else.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from nwor_specpv.errors import logger
from nwor_specpv.vllm.hooks import speculators
from nwor_specpv.vllm.registry import find_engine
from nwor_specpv.vllm.settings import read_settings

from .lengths import Lengths
from .publishing import CapsPublished


class LongContextScheduler(AsyncScheduler):
    """Decides before each step how many drafts the next one has. Thread-safety: none.

    Only our speculator follows it; with another, and without one, it is vLLM's scheduler.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chooses = speculators.wanted(self.vllm_config)
        self._wanted = self.num_spec_tokens  # drafts, of the latest step
        if not self._chooses:
            logger.warning(
                "nwor_specpv: --scheduler-cls %s has no effect: it is for mode 'lossless' with an "
                "EAGLE head",
                type(self).__name__,
            )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Without asynchronous scheduling, after each step: vLLM's runner reports as many drafts as
        there is room for, whether they were made or not."""
        if self._chooses:
            made = [tokens[: self._wanted] for tokens in draft_token_ids.draft_token_ids]
            draft_token_ids = DraftTokenIds(draft_token_ids.req_ids, made)
        super().update_draft_token_ids(draft_token_ids)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self._chooses:
            self._wanted = self._choose(scheduler_output)
            scheduler_output.num_spec_tokens_to_schedule = self._wanted
        super()._update_after_schedule(scheduler_output)

    def _choose(self, scheduler_output: Any) -> int:
        contexts = []
        for name, number in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            end = request.num_computed_tokens + number
            if end >= request.num_tokens + request.num_output_placeholders:  # it gets a token
                contexts.append(end)
        return self._choice().number(contexts)

    def _choice(self) -> Lengths:
        """The worker's own where it is in this process: it knows costs and acceptance."""
        engine = find_engine(self.vllm_config)
        if engine is not None and engine.lengths is not None:
            return engine.lengths
        if not hasattr(self, "_lengths"):
            settings = read_settings(self.vllm_config.additional_config)
            self._lengths = Lengths(settings, self.num_spec_tokens, single_rank=False)
        return self._lengths


class RefreshScheduler(CapsPublished, Scheduler):
    """vLLM's scheduler."""


class AsyncRefreshScheduler(CapsPublished, AsyncScheduler):
    """vLLM's asynchronous scheduler."""

    asynchronous = True
