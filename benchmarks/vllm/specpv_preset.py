"""Acceptance of specpv.py, set by hand: what partial passes and full steps find right.

* With a head, two of its guesses are right every time: in a pass, in a full step behind the chain
  that passes have made, and in a step that verifies the head's guesses alone.
* Without a head a looked-up token is right one time in three, if those before it were: half a token
  of a lookup on average. Passes take it in turns to find none and one right, for all requests
  alike, so that a pass yields 1.5 tokens and the host knows how long chains are.
* A full step confirms each draft of a chain with probability `agreement`, if those before it were
  confirmed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from engine_state import worker_runner

DRAFTS = 4  # guesses of a head, or looked-up tokens, that a pass confirms
RIGHT = 2  # of the head's, every time
LOOKUP_RATE = 1 / 3  # of a looked-up token
HEAD, LOOKUPS = "head", "lookups"


class Preset(ABC):
    """Of one engine. `install` before it starts, `follow` afterwards. Thread-safety: none."""

    def __init__(self, agreement: float) -> None:
        self._agreement = agreement
        self._rates: dict[int, torch.Tensor] = {}  # by the length of chains

    @abstractmethod
    def matching(self, said: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        """[B]: right guesses of a pass, in the place of `chain.matching_guesses`."""

    @abstractmethod
    def begin(self) -> None:
        """A proposal begins."""

    @abstractmethod
    def made(self, passes: int) -> int:
        """The length of chains that so many passes have made."""

    @abstractmethod
    def behind(self, number: int) -> list[float]:
        """How often guesses are right that no pass has seen: so many behind the chain."""

    def rates(self, chain: int, limit: int) -> list[float]:
        """How often a full step accepts each of `limit` drafts, if those before it were."""
        chain = min(chain, limit)
        return [self._agreement] * chain + self.behind(limit - chain)

    def tokens(self, drafts: int) -> float:
        """That a step with so many guesses, and no passes, yields on average."""
        found, right = 1.0, 1.0
        for rate in self.rates(0, drafts):
            right *= rate
            found += right
        return found

    def install(self) -> None:
        """Partial passes find right what the preset says."""
        from nwor_specpv.vllm.specpv import chain

        chain.matching_guesses = self.matching

    def follow(self, llm: Any) -> None:
        """Full steps accept what the preset says of the latest proposal, and so does what the
        scheduler foresees."""
        runner = worker_runner(llm)
        speculator, rates = runner.speculator, runner.rejection_sampler.synthetic_conditional_rates
        propose = speculator.propose

        def followed(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            drafts = propose(*args, **kwargs)
            rates.copy_(self._on_device(self.made(speculator.latest_passes), rates))
            return drafts

        speculator.propose = followed
        decisions = llm.llm_engine.engine_core.engine_core.scheduler.decisions
        if decisions.scouts is not None:
            decisions.choice.foresee = lambda drafts: (self.tokens(drafts), 0.05)

    def _on_device(self, chain: int, rates: torch.Tensor) -> torch.Tensor:
        if chain not in self._rates:
            self._rates[chain] = rates.new_tensor(self.rates(chain, rates.shape[0]))
        return self._rates[chain]


class HeadPreset(Preset):
    def matching(self, said: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        return torch.full_like(said[:, 0], RIGHT, dtype=torch.int32)

    def begin(self) -> None:
        """Its passes are alike."""

    def made(self, passes: int) -> int:
        return passes * (1 + RIGHT)

    def behind(self, number: int) -> list[float]:
        return [float(place < RIGHT) for place in range(number)]


class LookupPreset(Preset):
    def __init__(self, agreement: float) -> None:
        super().__init__(agreement)
        self._turn = 0  # right guesses of the next pass
        self._device_turn: torch.Tensor | None = None  # the same, for passes in graphs

    def matching(self, said: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
        if self._device_turn is None:  # the first pass of all, which is not in a graph
            self._device_turn = torch.zeros(1, dtype=torch.int32, device=said.device)
        found = self._device_turn.repeat(said.shape[0])
        self._device_turn.bitwise_xor_(1)
        return found

    def begin(self) -> None:
        if self._device_turn is not None:
            self._device_turn.fill_(self._turn)

    def made(self, passes: int) -> int:
        """Asked once for each proposal."""
        right = (passes + self._turn) // 2
        self._turn ^= passes & 1
        return passes + right

    def behind(self, number: int) -> list[float]:
        return [LOOKUP_RATE] * number


def preset(guesses: str, agreement: float) -> Preset:
    """Where guesses come from: HEAD or LOOKUPS."""
    return (HeadPreset if guesses == HEAD else LookupPreset)(agreement)
