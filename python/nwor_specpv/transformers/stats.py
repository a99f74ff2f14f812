"""Statistics of a generation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counts over all requests of one call of `generate`."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts, found in the cache or shared by prompts of the call
    new_tokens: int = 0
    steps: int = 0  # verification steps of a request; a batch of four is four
    passes: int = 0  # forward passes after the prompts
    drafts: int = 0
    accepted: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # accepted drafts -> steps
    rows: Counter[int] = field(default_factory=Counter)  # rows of a tree -> steps
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0  # of the decoding
    cache_bytes_written: int = 0  # of all rows: prompts, roots and accepted drafts
    draft_bytes_written: int = 0  # of these, accepted drafts
    cache_bytes_avoided: int = 0  # rejected drafts
    rejected_tokens: int = 0
    rows_saved: int = 0  # rows of long chains that chunked verification did not run
    step_kinds: Counter[str] = field(default_factory=Counter)
    coverage: list[tuple[int, int]] = field(default_factory=list)  # (context, tokens seen)
    rechecked_tokens: int = 0
    disagreed_tokens: int = 0  # of those: full attention would have chosen otherwise
    cut_tokens: int = 0  # lossless: accepted by partial steps, refused by a full one
    graph_replays: int = 0  # passes that were replayed CUDA graphs
    eager_passes: Counter[str] = field(
        default_factory=Counter
    )  # passes without a graph on CUDA, by reason
    violations: list[str] = field(default_factory=list)
    seed: int | None = None

    @property
    def tokens_per_step(self) -> float:
        """Without each request's first token, which the prompt's pass gives."""
        return (self.new_tokens - self.requests) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, without the first tokens."""
        later = self.new_tokens - self.requests
        return later / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def view_coverage(self) -> float | None:
        """Share of the tokens that partial steps attended to."""
        context = sum(there for there, _ in self.coverage)
        return sum(seen for _, seen in self.coverage) / context if context else None

    @property
    def drift(self) -> float | None:
        return self.disagreed_tokens / self.rechecked_tokens if self.rechecked_tokens else None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        numbers = {
            name: value
            for name, value in vars(self).items()
            if not isinstance(value, (Counter, list))
        }
        for name in ("accepted_lengths", "rows", "step_kinds", "eager_passes"):
            counts = getattr(self, name)
            numbers[name] = {str(key): counts[key] for key in sorted(counts)}
        for name in ("tokens_per_step", "tokens_per_second", "view_coverage", "drift"):
            numbers[name] = getattr(self, name)
        numbers["violations"] = list(self.violations)
        return numbers
