"""What a host asks of a drafter, and how large its trees may be.

    drafter.begin(request, prompt_ids)
    drafter.observe(request, tokens, features)       # after the prompt and after every commit
    trees = drafter.draft([request], tree)           # one tree per request, the root first
    drafter.end(request)

The host owns cache, verification and acceptance: a drafter that proposes nonsense costs time,
never output.
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
    """The size of what is drafted: `rows` counts the root; a `top_k` of 1 is a chain.

    `rows = 0` leaves the number to the host, which measures what pays.
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
    """Proposes trees for requests of a host. Called from one thread at a time."""

    #: Layers of the target whose outputs `observe` is given, concatenated; none: no features.
    feature_layers: tuple[int, ...] = ()

    @abstractmethod
    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None:
        """A new request. Its prompt has not been run yet; `observe` tells when it has."""

    @abstractmethod
    def observe(
        self, request: Hashable, tokens: Sequence[int], features: torch.Tensor | None
    ) -> None:
        """What became final, in order.

        `features[i]` belongs to the i-th row that was run and committed since the last call
        (prompt rows, then root and accepted drafts); `tokens[i]` is the token that follows that
        row. The last of `tokens` is the next root: emitted, not run yet.
        """

    def retract(self, request: Hashable, num_tokens: int) -> bool:
        """Takes back the last `num_tokens` tokens that were observed, with their rows.

        A host that verifies over a partial view may find later that tokens do not stand; it then
        observes those rows again, with what follows them now. False: the drafter cannot, and the
        host begins the request anew. 0 changes nothing, less is refused.
        """
        return False

    @abstractmethod
    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[DraftTree]:
        """One tree per request, its root first; the root alone where there is nothing to say.

        A request is named once. A draft that fails loses nothing of what was observed.
        """

    @abstractmethod
    def end(self, request: Hashable) -> None:
        """The request is over; everything kept for it goes."""


def check_requests(requests: Sequence[Hashable]) -> None:
    """Refuses a request that is to be drafted for twice at once."""
    for request, count in Counter(requests).items():
        if count > 1:
            raise NworError(f"requests: got {request!r} {count} times, expected every request once")


def check_retracted(num_tokens: int) -> None:
    """Refuses a number of tokens that cannot be taken back."""
    if num_tokens < 0:
        raise NworError(f"num_tokens: got {num_tokens}, expected 0 or more")
