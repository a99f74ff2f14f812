"""The interface of drafters, and the size of their trees.

    drafter.begin(request, prompt_ids)
    drafter.observe(request, tokens, features)       # after the prompt and after every commit
    trees = drafter.draft([request], tree)           # one tree per request, the root first
    drafter.end(request)

The host owns cache, verification and acceptance: a wrong draft costs time and never changes the
output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nwor_specpv.errors import NworError

if TYPE_CHECKING:
    import torch

    from nwor_specpv._C import DraftTree


@dataclass(frozen=True)
class TreeConfig:
    """The largest tree: `rows` includes the root; a `top_k` of 1 gives a chain.

    With `rows = 0` the host chooses the number from measured costs.
    """

    rows: int = 0
    depth: int = 5
    top_k: int = 4

    def __post_init__(self) -> None:
        for name, low, high in (("rows", 0, 256), ("depth", 1, 64), ("top_k", 1, 64)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise NworError(f"{name}: got {value!r}, expected {low} to {high}")


class Drafter(ABC):
    """Proposes trees for the requests of a host. Hosts call it from one thread at a time."""

    #: Layers of the target whose concatenated outputs `observe` gets; empty: no features.
    feature_layers: tuple[int, ...] = ()

    @abstractmethod
    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None:
        """Starts a request. Its prompt has not been run yet; `observe` reports when it has."""

    @abstractmethod
    def observe(
        self, request: Hashable, tokens: Sequence[int], features: torch.Tensor | None
    ) -> None:
        """Reports what became final, in order.

        `features[i]` belongs to the i-th row that was run and committed since the last call
        (prompt rows, then root and accepted drafts); `tokens[i]` is the token that follows that
        row. The last of `tokens` is the next root: emitted, not run yet.
        """

    def retract(self, request: Hashable, num_tokens: int) -> bool:
        """Takes back the last `num_tokens` tokens that were observed, with their rows.

        A host that verifies over a partial view may reject tokens later; it then observes those
        rows again, with the tokens that follow them now. Returns False if the drafter cannot do
        this; the host then starts the request again. 0 changes nothing, less is an error.
        """
        return False

    @abstractmethod
    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[DraftTree]:
        """Returns one tree per request, root first; the root alone where nothing is proposed.

        Each request appears once. A draft that fails loses nothing that was observed.
        """

    @abstractmethod
    def end(self, request: Hashable) -> None:
        """Ends the request and drops everything kept for it."""


def check_requests(requests: Sequence[Hashable]) -> None:
    """Raises if a request appears twice."""
    for request, count in Counter(requests).items():
        if count > 1:
            raise NworError(f"requests: got {request!r} {count} times, expected every request once")


def check_retracted(num_tokens: int) -> None:
    """Raises unless `num_tokens` can be taken back."""
    if num_tokens < 0:
        raise NworError(f"num_tokens: got {num_tokens}, expected 0 or more")
