"""Accepts the drafts of a pass, each call by its own options: greedy or sampled, both lossless.

    judge = Judge()
    store = SessionStore(interceptor, forward, judge.accept)
    server = Server(store, judge=judge, ...)

A call's coins come from its seed and the positions they decide, and each call is judged by itself,
so its tokens do not depend on which calls share the pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nwor_specpv.errors import NworError
from nwor_specpv.ops.acceptance import (
    accept_chain_sampling,
    accept_greedy,
    accept_sampling,
    make_coins,
)
from nwor_specpv.ops.logits import target_probs

from .distributions import DraftDistributions

if TYPE_CHECKING:
    from nwor_specpv import DraftTree, SessionBatch

_MOST_FLOAT = torch.finfo(torch.float32).max
_LEAST_FLOAT = torch.finfo(torch.float32).tiny
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """A sampled call's options, and what its drafts were drawn from."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    root_position: int  # of the last new token
    distributions: DraftDistributions | None


def read_sampling(request: Any, tree: DraftTree | None, vocab_size: int) -> Sampling | None:
    """The options of a VerifyDraftsRequest; None: greedy. Raises NworError for wrong ones."""
    given = request.sampling
    top_p = given.top_p if given.HasField("top_p") else 1.0
    if not 0 <= given.temperature <= _MOST_FLOAT:
        raise NworError(f"temperature: got {given.temperature}, expected 0 or more, in float32")
    if given.top_k < 0:
        raise NworError(f"top_k: got {given.top_k}, expected 0 (all) or more")
    if not 0 < top_p <= 1:
        raise NworError(f"top_p: got {top_p}, expected more than 0, at most 1")
    if given.temperature == 0:
        for name, used, value in (
            ("top_k", given.top_k > 0, given.top_k),
            ("top_p", top_p < 1, top_p),
            ("distributions", request.HasField("distributions"), "some"),
        ):
            if used:
                raise NworError(
                    f"{name}: got {value} beside temperature 0, which takes the first choice; "
                    "expected a temperature above 0"
                )
        return None
    return Sampling(
        temperature=max(given.temperature, _LEAST_FLOAT),
        top_k=min(given.top_k, _MOST_TOKENS),
        top_p=max(top_p, _LEAST_FLOAT),
        seed=given.seed if given.HasField("seed") else secrets.randbits(63),
        root_position=request.expected_prefix_len + len(request.new_tokens) - 1,
        distributions=_read_distributions(request, tree, vocab_size),
    )


def _read_distributions(
    request: Any, tree: DraftTree | None, vocab_size: int
) -> DraftDistributions | None:
    if not request.HasField("distributions"):
        return None
    if tree is None or len(tree.tokens) < 2:
        raise NworError("distributions: got some beside no drafts, expected none")
    parents = list(request.tree.parents)
    if parents and parents != list(range(-1, len(parents) - 1)):
        raise NworError(
            "distributions: got some beside a tree that branches, expected a chain; a tree is "
            "judged without them, which is lossless too"
        )
    return DraftDistributions(request.distributions, list(tree.tokens)[1:], vocab_size)


class Judge:
    """The acceptance of one store. `accept` is the store's function."""

    def __init__(self) -> None:
        self._sampled: Mapping[str, Sampling] = {}

    @contextmanager
    def using(self, sampled: Mapping[str, Sampling]) -> Iterator[None]:
        """Passes that run inside sample these sessions; all others are greedy."""
        self._sampled = sampled
        try:
            yield
        finally:
            self._sampled = {}

    def accept(
        self, batch: SessionBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Judges a pass by logits of all rows [T, V], or of the rows `tree_rows.unique()` alone."""
        sampled = self._sampled
        rows = batch.tree_rows
        if len(logits) != len(batch.tokens):
            rows = torch.searchsorted(rows.unique(), rows)
        best, ids = logits.max(-1)
        if not bool(best.isfinite()[rows].all()):
            raise RuntimeError("the model's logits are NaN or infinite")
        verdict = accept_greedy(batch.tree_tokens, ids[rows], batch.first_child, batch.next_sibling)
        path, counts, following = (part.cpu() for part in verdict)
        if any(name in sampled for name in batch.sessions):
            sizes = 1 + (batch.tree_parents[:, 1:] >= 0).sum(-1).cpu()
            roots = batch.positions[batch.tree_rows[:, 0]].cpu()
            for index, name in enumerate(batch.sessions):
                if name not in sampled:
                    continue
                size = int(sizes[index])
                own = _sample(
                    sampled[name], batch, index, logits[rows[index, :size]], int(roots[index])
                )
                path[index] = -1
                path[index, :size], counts[index], following[index] = own
        return path, counts, following


def _sample(
    sampling: Sampling, batch: SessionBatch, index: int, logits: torch.Tensor, root: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Judges one session's tree by the logits of its rows."""
    device, size = logits.device, len(logits)
    tree = slice(index, index + 1), slice(0, size)
    tokens = batch.tree_tokens[tree]
    seed, position = (torch.tensor([value], device=device) for value in (sampling.seed, root + 1))
    coins = make_coins(seed, position, size)
    try:
        probs = target_probs(
            logits[None],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        if sampling.distributions is None or size == 1:
            links = batch.first_child[tree], batch.next_sibling[tree]
            judged = accept_sampling(tokens, probs, *links, *coins)
        else:
            # A later chunk of a chain begins at one of its drafts.
            first = root - sampling.root_position
            drawn = sampling.distributions.dense(first, size - 1, device)
            judged = accept_chain_sampling(tokens, probs, drawn[None], *coins)
    except NworError as error:
        # To a client an NworError means wrong arguments, and these were checked before.
        raise RuntimeError(f"the model's logits cannot be sampled: {error}") from error
    path, counts, following = (part[0].cpu() for part in judged)
    if int(following) < 0:  # on CUDA a fault raises nothing
        raise RuntimeError("the model's logits cannot be sampled: no token can be chosen")
    return path, counts, following
