"""vLLM's scheduler for `draft_tree: auto`: nwor_specpv.vllm.tree.scheduler.TreeScheduler"""

from __future__ import annotations

from nwor_specpv.vllm.hooks import speculators
from nwor_specpv.vllm.scheduling.scheduler import ChoosingScheduler
from nwor_specpv.vllm.settings import read_settings

from . import rules
from .decisions import TreeDecisions


class TreeScheduler(ChoosingScheduler):
    """Steps are plain or verify trees of so many rows as have been fastest. Thread-safety: none."""

    purpose = '"draft_tree": "auto" with an EAGLE head'
    chooses_rows = True

    def make_decisions(self) -> TreeDecisions | None:
        """See the base class."""
        settings = read_settings(self.vllm_config.additional_config)
        if settings.draft_tree != "auto" or not speculators.drafts_trees(self.vllm_config):
            return None
        return TreeDecisions(rules.room_of_step(settings, rules.describe(self.vllm_config)))
