"""Whether drafting over views, or measuring its costs, writes to the caches vLLM serves from."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from support.engines import caches, own_engine


class ProposalWriteWatch:
    """Looks at the target's caches before and after each proposal of the newest engine's drafter.

    Our side must know its runner, so some request has been served before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nwor_specpv.vllm.specpv.draft_loop import DraftLoop

        # Passes of each proposal; whether drafting wrote, and whether the step before it did.
        self._proposals: list[tuple[int, bool, bool]] = []
        self._latest: dict[str, torch.Tensor] = {}
        self._eager = 0  # passes of model runner V2 that no graph did
        runner = own_engine().runner
        drafter = runner.drafter if hasattr(runner, "input_batch") else runner.speculator
        propose, run_pass = drafter.propose, DraftLoop._pass

        def watched(*args: Any, **kwargs: Any) -> Any:
            before, held = self._num_passes(), self._bits()
            found = propose(*args, **kwargs)
            now = self._bits()
            wrote = self._differ(held, now), self._differ(self._latest, held)
            self._proposals.append((self._num_passes() - before, *wrote))
            self._latest = now
            return found

        def counting(loop: DraftLoop, *args: Any, **kwargs: Any) -> None:
            self._eager += 1
            run_pass(loop, *args, **kwargs)

        monkeypatch.setattr(drafter, "propose", watched)
        monkeypatch.setattr(DraftLoop, "_pass", counting)

    def check(self) -> None:
        """No byte was other after a proposal, and proposals came by passes after steps that wrote.

        V1 replays full steps alone; on V2 partial passes are graphs as well.
        """
        by_passes = [written for passes, _, written in self._proposals if passes]
        print(f"{len(self._proposals)} proposals, {len(by_passes)} of them by passes")
        assert len(self._latest) == len(own_engine().own_layers) > 0
        assert len(by_passes) > 4
        assert not any(changed for _, changed, _ in self._proposals)
        assert any(by_passes)  # the caches that full steps write to
        assert self._eager == 0

    @staticmethod
    def _num_passes() -> int:
        return Metrics().snapshot()["specpv_draft_passes_total"]

    @staticmethod
    def _bits() -> dict[str, torch.Tensor]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {name: cache.view(torch.int16) for name, cache in caches().items()}

    @staticmethod
    def _differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return not all(torch.equal(one[name], other[name]) for name in one)


def watch_cost_measurement(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> list[bool]:
    """For each call of `module.name`: whether the caches, filled with something, were the same
    afterwards."""
    measure, found = getattr(module, name), []

    def watched(*args: Any) -> Any:
        caches = [layer.kv_cache for layer in own_engine().layers.values()]
        for cache in caches:
            cache.normal_()
        held = [cache.clone() for cache in caches]
        costs = measure(*args)
        found.append(all(map(torch.equal, held, caches)))
        for cache in caches:
            cache.zero_()
        return costs

    monkeypatch.setattr(module, name, watched)
    return found
