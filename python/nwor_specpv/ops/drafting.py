"""Drafts without a model, for texts and logits that lie on the device."""

from __future__ import annotations

import torch

from ._call import call


def ngram_lookup(
    text: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    *,
    min_tokens: int = 2,
    max_tokens: int = 5,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What followed the last tokens of each text where they stood before.

    `text` [R, capacity] int32; request b has the first `lens[b]` tokens of row `rows[b]` (both [B]
    int32), and no text where that row does not exist. Returns guesses [B, count] int64 and the
    tokens in common [B] int32, `max_tokens` (16 at most) or fewer. The longest match counts, of
    equal ones the latest; guesses that run into the text's end go on with what follows the match.
    Fewer than `min_tokens` in common are no match: 0 in common, and the guesses are the last token,
    or 0 without a text. On CUDA the host reads nothing, so a lookup can be captured in a graph.
    """
    op = torch.ops.nwor_specpv.ngram_lookup.default
    return call(op, text, rows, lens, min_tokens, max_tokens, count)


def certain_logits(
    logits: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Logits of drafts that were not drawn: draft i >= `starts[b]` is `tokens[b, i]` for certain.

    `logits` [R, drafts, vocabulary] float32; request b has row `rows[b]`, and none where that row
    does not exist. `rows` and `starts` [B] int32, `tokens` [B, drafts] int64. The token's logit
    becomes 0 and all others -1e30. Earlier drafts are not touched.
    """
    call(torch.ops.nwor_specpv.certain_logits.default, logits, rows, starts, tokens)
