"""Runs the head ahead of the target, as in drafting ("training-time test").

Step 0 reads the target's features at every row; step j reads the head's own output of step j - 1
and the true token. A row's entry of step j attends to the entries of step 0 up to that row, and to
the row's own entries of steps 1 .. j, as in a drafted chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from nwor_specpv.drafters.eagle3_head import Eagle3Head, rotate

from .corpus import Corpus
from .target import multiply_float

MAX_STEPS = 64


@dataclass
class UnrollBatch:
    """Rows of a corpus, prepared for the unrolled head. Tokens are flat: T = rows * length."""

    embeddings: torch.Tensor  # [rows, L, hidden]: of the tokens
    features: torch.Tensor  # [rows, L, layers * hidden]
    bias: torch.Tensor  # [rows, 1, 1, L, L]: 0 where an entry is seen, else -inf
    probabilities: torch.Tensor  # [T, draft vocabulary]: the target's for the next token
    best: torch.Tensor  # [T]: the target's choice as a draft id; -1: none
    weight: torch.Tensor  # [T]: weight of each row's next token
    start: torch.Tensor  # [rows, L]

    def ahead(self, step: int) -> torch.Tensor:
        """[T - step - 1]: weight of what an entry predicts in `step`, `step` + 1 rows ahead."""
        rows, length = self.start.shape
        shift = step + 1
        place = torch.arange(length, device=self.start.device)
        same = torch.zeros_like(self.start, dtype=torch.bool)
        if shift < length:
            same[:, :-shift] = self.start[:, shift:] == self.start[:, :-shift]
        same &= place + shift < length
        return self.weight[shift:] * same.view(-1)[: rows * length - shift]


def make_batch(
    corpus: Corpus,
    head: Eagle3Head,
    embedding: torch.Tensor,
    to_draft: torch.Tensor,
    output: torch.Tensor,
    label_temperature: float = 1.0,
) -> UnrollBatch:
    """`to_draft` [vocabulary] gives draft ids, -1 for none; `output` is the matrix of those."""
    hidden = head.shape.hidden
    features = corpus.features[..., :-hidden]
    normed = corpus.features[..., -hidden:]
    start = corpus.start.int()
    length = start.shape[1]
    place = torch.arange(length, device=start.device)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < head.shape.window)
    seen = seen & (start[:, :, None] == start[:, None, :])
    bias = torch.zeros(seen.shape, dtype=embedding.dtype, device=start.device)
    bias.masked_fill_(~seen, float("-inf"))
    logits = multiply_float(normed.flatten(0, 1), output)
    probabilities = torch.softmax(logits.div_(label_temperature), dim=-1).to(embedding.dtype)
    best = to_draft[corpus.best.flatten().long()]
    # A choice outside the draft vocabulary cannot be drafted and gets no weight.
    weight = corpus.weight.flatten().float() * (best >= 0)
    return UnrollBatch(
        embedding[corpus.tokens.long()],
        features,
        bias[:, None, None],
        probabilities,
        best,
        weight,
        start,
    )


class Unroll:
    """Runs a batch step by step."""

    def __init__(self, head: Eagle3Head, batch: UnrollBatch) -> None:
        self._head, self._batch = head, batch
        length = batch.start.shape[1]
        cos, sin = head.rotation(length + MAX_STEPS)
        dtype, device = batch.embeddings.dtype, batch.embeddings.device
        self._cos, self._sin = cos.to(device, dtype)[:, None], sin.to(device, dtype)[:, None]
        self._length = length
        self._keys: list[torch.Tensor] = []  # of each step: [rows, Hkv, L, D]
        self._values: list[torch.Tensor] = []
        self._hidden = head.fuse(batch.features)

    def step(self) -> torch.Tensor:
        """The next step's normalised outputs [T, hidden]."""
        head, length, index = self._head, self._length, len(self._keys)
        shape = head.shape
        groups = shape.num_heads // shape.num_kv_heads
        # Row r's entry of this step holds the token index + 1 rows ahead.
        tokens = pad(self._batch.embeddings[:, index + 1 :], (0, 0, 0, index + 1))[:, :length]
        query, key, value = head.project(tokens, self._hidden)
        cos, sin = (table[index : index + length] for table in (self._cos, self._sin))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        self._keys.append(key.transpose(1, 2))
        self._values.append(value.transpose(1, 2))
        grouped = query.transpose(1, 2).unflatten(1, (shape.num_kv_heads, groups))
        attended = self._attend(grouped * shape.head_dim**-0.5)
        attended = attended.flatten(1, 2).transpose(1, 2).flatten(2)
        self._hidden = head.finish(self._hidden, attended)
        return head.normalize(self._hidden).flatten(0, 1)

    def _attend(self, query: torch.Tensor) -> torch.Tensor:
        """query [rows, Hkv, groups, L, D] -> the same."""
        rows, kv_heads, groups, length, dim = query.shape
        first_key, first_value = self._keys[0], self._values[0]
        flat = query.reshape(rows, kv_heads, groups * length, dim)
        scores = (flat @ first_key.transpose(2, 3)).view(rows, kv_heads, groups, length, length)
        scores = scores + self._batch.bias
        own = [(query * key[:, :, None]).sum(-1) for key in self._keys[1:]]
        # The columns of own entries are padded, so that rows stay aligned for fast products.
        more = torch.stack(own, dim=-1) if own else query[..., :0]
        more = pad(more, (0, -len(own) % 8), value=float("-inf")) if own else more
        shares = torch.softmax(torch.cat([scores, more], dim=-1), dim=-1)
        main = shares[..., :length].reshape(rows, kv_heads, groups * length, length)
        attended = (main @ first_value).view(query.shape)
        for place, value in enumerate(self._values[1:]):
            share = shares[..., length + place : length + place + 1]
            attended = attended + share * value[:, :, None]
        return attended


class _SoftLoss(torch.autograd.Function):
    """Cross entropy against the target's probabilities over a frozen output matrix.

    The forward pass computes the gradient, some rows at a time, so that the scores of a whole batch
    are never in memory.
    """

    @staticmethod
    def forward(ctx, normed, output, probabilities, weight, chunk):
        gradient = torch.empty_like(normed)
        for at in range(0, normed.shape[0], chunk):
            rows = slice(at, at + chunk)
            difference = torch.softmax(linear(normed[rows], output), dim=-1)
            difference.sub_(probabilities[rows])
            gradient[rows] = difference @ output
        ctx.save_for_backward(gradient.mul_(weight[:, None].to(gradient.dtype)))
        return normed.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, scale):
        (gradient,) = ctx.saved_tensors
        return gradient * scale.to(gradient.dtype), None, None, None, None


def soft_loss(
    normed: torch.Tensor,
    output: torch.Tensor,
    probabilities: torch.Tensor,
    weight: torch.Tensor,
    chunk: int = 8192,
) -> torch.Tensor:
    """A loss with a gradient; its value is not computed."""
    return _SoftLoss.apply(normed, output, probabilities, weight, chunk)


@torch.no_grad()
def ranks(
    head: Eagle3Head, batch: UnrollBatch, output: torch.Tensor, steps: int, chunk: int = 4096
) -> torch.Tensor:
    """[steps, T]: rank of the target's choice among the head's guesses at each step, from 0.

    The tokens before it are the true ones. Where there is no choice (the text ends, or the draft
    vocabulary lacks it) the rank is the vocabulary's size.
    """
    unroll, size = Unroll(head, batch), output.shape[0]
    found = torch.full((steps, batch.best.shape[0]), size, device=output.device)
    for step in range(steps):
        normed = unroll.step()
        wanted = torch.where(batch.ahead(step) > 0, batch.best[step + 1 :], -1)
        for at in range(0, wanted.shape[0], chunk):
            here = wanted[at : at + chunk]
            scores = multiply_float(normed[at : at + here.shape[0]], output)
            own = scores.gather(1, here.clamp(min=0)[:, None])
            place = (~(scores <= own)).sum(-1)  # a NaN ranks last
            found[step, at : at + here.shape[0]] = torch.where(here >= 0, place, size)
    return found
