"""vLLM's scheduler, which decides before each step what drafts the next one has.

It changes one number that vLLM's scheduler has for this purpose. It serves engines with and without
asynchronous scheduling.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import DraftTokenIds

from nwor_specpv.errors import logger

from .decisions import Decisions


class ChoosingScheduler(AsyncScheduler):
    """Where there is nothing to decide, it is vLLM's scheduler. Thread-safety: none."""

    purpose: str  # what it is for, for the log

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wanted = self.num_spec_tokens  # drafts, of the latest step
        self.decisions = self.make_decisions()
        if self.decisions is None:
            logger.warning(
                "nwor_specpv: --scheduler-cls %s has no effect: it is for %s",
                type(self).__name__,
                self.purpose,
            )

    @abstractmethod
    def make_decisions(self) -> Decisions | None:
        """Of this engine; None: its drafts are not ours to choose."""

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
            arm = self.decisions.decide(scheduler_output, self.requests, time.perf_counter())
            self._wanted = arm.drafts
        super()._update_after_schedule(scheduler_output)
