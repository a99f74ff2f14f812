"""Mode `refresh` with prefix caching: what may be given to other requests.

K/V of partial steps stays as partial attention made it, so blocks that hold some must not be found
by others. Prompts are computed in full, and so is everything in contexts that are too short for a
view; no block beyond both is published. That is known from settings alone: the scheduler may be in
another process than the worker that decides.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from nwor_specpv import VerifyPolicy
from nwor_specpv.config import Settings
from nwor_specpv.errors import NworError, logger
from nwor_specpv.vllm import versions
from nwor_specpv.vllm.settings import read_settings


def full_tokens(settings: Settings, num_drafts: int, batches: int) -> int:
    """Tokens at the front of every request whose K/V comes from full attention.

    `batches`: steps that may be in flight at once. Those behind the first are decided as if all
    drafts before them were accepted, so their contexts are taken for longer than they are.
    """
    config = settings.specpv()
    bound = VerifyPolicy(config).always_full_tokens(config.budget(1 + num_drafts))
    return max(0, bound - (batches - 1) * num_drafts)


class CapsPublished:
    """Over one of vLLM's schedulers: caps what a request publishes. Thread-safety: none.

    All blocks are published through one method of the cache's coordinator.
    """

    asynchronous = False  # whether the scheduler below is

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = read_settings(self.vllm_config.additional_config)
        refreshes = settings.enable_specpv and settings.specpv_mode == "refresh"
        if not refreshes or not self.kv_cache_manager.enable_caching:
            logger.warning(
                "nwor_specpv: --scheduler-cls %s has no effect: it is for mode 'refresh' with "
                "prefix caching",
                type(self).__name__,
            )
            return
        coordinator = self.kv_cache_manager.coordinator
        problem = versions.signature_problem(
            type(coordinator).cache_blocks, versions.adapter.publish_blocks.parameters
        )
        if problem is not None:
            raise NworError(
                f"nwor_specpv, prefix caching: {problem}; install vLLM {versions.supported()}"
            )
        batches = self.vllm_config.max_concurrent_batches
        self.full_tokens = full_tokens(settings, self.num_spec_tokens, batches)
        self._prompts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._publish = coordinator.cache_blocks
        coordinator.cache_blocks = self._publish_capped
        logger.info(
            "nwor_specpv: publishing prompts, and answers up to %d tokens of context, to the "
            "prefix cache",
            self.full_tokens,
        )

    def publishable(self, request: Any) -> int:
        """Tokens of a request that others may have.

        The prompt is what it was at first: a session that goes on calls its old answers prompt.
        """
        return max(self.full_tokens, self._prompts.setdefault(request, request.num_prompt_tokens))

    def _publish_capped(self, request: Any, num_computed_tokens: int) -> None:
        self._publish(request, min(num_computed_tokens, self.publishable(request)))
