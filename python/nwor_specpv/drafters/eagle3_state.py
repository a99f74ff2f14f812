"""What an EAGLE3 drafter keeps of a request, and trees while they grow."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class RequestState:
    """The state of one request."""

    keys: torch.Tensor  # [Hkv, capacity, D], rotated
    values: torch.Tensor  # the same
    oldest: int = 0  # the first entry that is still read
    length: int = 0  # where the next entry goes
    position: int = 0  # of the next entry, for rotary positions
    root: int | None = None
    hidden: torch.Tensor | None = None  # [hidden]: output of the last entry, if that is read
    # Tokens of the text that the draft vocabulary lacks, the latest last, and their matrix.
    own_ids: dict[int, None] = field(default_factory=dict)
    own_tokens: torch.Tensor | None = None  # [E]
    own_rows: torch.Tensor | None = None  # [E, hidden]
    pending: list[tuple[torch.Tensor, list[int]]] = field(default_factory=list)


@dataclass
class NewEntries:
    """Entries that are about to be added to a request; only `settle` changes the request."""

    state: RequestState
    features: torch.Tensor  # [n, ..]
    tokens: list[int]
    oldest: int
    position: int  # of the first of them

    @property
    def end(self) -> int:
        return self.state.length + len(self.tokens)

    def leave_out(self, finite: list[bool]) -> None:
        """Drops everything up to the last entry that is not finite."""
        if not all(finite):
            self.oldest = self.end - finite[::-1].index(False)

    def settle(self, output: torch.Tensor) -> None:
        state = self.state
        state.hidden = output if self.oldest < self.end else None
        state.position = self.position + len(self.tokens)
        state.oldest, state.length = self.oldest, self.end
        state.pending.clear()


@dataclass
class Growth:
    """Trees that are growing, of all requests at once: B requests, k rows a depth."""

    tokens: list[torch.Tensor]  # [B, k], then [B, k * k]: candidates of each depth
    scores: list[torch.Tensor]  # the same: log probabilities along the path
    parents: list[torch.Tensor]  # [B, k]: ids of the candidates that were grown further


def new_entries(state: RequestState, window: int) -> NewEntries:
    """The pending entries; of a long text only those in the head's window."""
    tokens = [token for _, some in state.pending for token in some]
    features = torch.cat([part for part, _ in state.pending])[-window:].float()
    passed = max(0, len(tokens) - window)
    # Entries before skipped ones are no longer adjacent, so they are not read.
    oldest = state.length if passed else state.oldest
    return NewEntries(state, features, tokens[-window:], oldest, state.position + passed)
