"""Tiny random decoders of several families, plain decoding, a drafter that is sometimes right."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from functools import cache

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from nwor_specpv import DraftTree
from nwor_specpv.drafters import Drafter, TreeConfig

VOCAB = 96
TREES = {
    "chain": TreeConfig(rows=5, depth=4, top_k=1),
    "tree": TreeConfig(rows=14, depth=4, top_k=3),
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda **sizes: LlamaConfig(**SIZES | sizes),
    "qwen2": lambda **sizes: Qwen2Config(**SIZES | sizes),
    "qwen3": lambda **sizes: Qwen3Config(**SIZES | sizes, head_dim=32),
    "mistral": lambda **sizes: MistralConfig(**SIZES | sizes, sliding_window=24, head_dim=16),
}


@cache
def tiny(family: str = "llama", seed: int = 0, **sizes: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = FAMILIES[family](**sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def decode_plainly(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, one token a step, with transformers' own cache and attention."""
    past = DynamicCache(config=model.config)
    tokens, rows = list(prompt), torch.tensor([prompt], device=model.device)
    for _ in range(count):
        logits = model(rows, past_key_values=past).logits
        tokens.append(int(logits[0, -1].argmax()))
        rows = torch.tensor([tokens[-1:]], device=model.device)
    return tokens[len(prompt) :]


def clear_prompt(
    model: PreTrainedModel, rng: random.Random, low: int, high: int, count: int = 48
) -> tuple[list[int], list[int]]:
    """A prompt and how it goes on, never by a choice so close that rounding decides it."""
    while True:
        prompt = random_prompt(rng, low, high)
        truth = decode_plainly(model, prompt, count)
        ids = torch.tensor([prompt + truth[:-1]], device=model.device)
        with torch.no_grad():
            best = model(ids).logits[0, len(prompt) - 1 :].float().topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > 1e-3:
            return prompt, truth


def random_prompt(rng: random.Random, low: int = 3, high: int = 40) -> list[int]:
    """Without 0, which pads."""
    return [rng.randrange(1, VOCAB) for _ in range(rng.randrange(low, high))]


class Oracle(Drafter):
    """Knows how each prompt goes on and tells it, with mistakes, among wrong siblings.

    Checks what a host promises to a drafter: rows and their features in order, one root.
    """

    def __init__(
        self,
        truths: dict[tuple[int, ...], list[int]],
        rng: random.Random,
        *,
        right: float = 0.7,
        feature_layers: tuple[int, ...] = (),
        can_retract: bool = True,
    ) -> None:
        self._truths, self._rng, self._right = truths, rng, right
        self.feature_layers = feature_layers
        self._can_retract = can_retract
        self.seen: dict[Hashable, list[int]] = {}
        self.prompts: dict[Hashable, list[int]] = {}
        self.features: dict[Hashable, list[torch.Tensor]] = {}
        self.retracted = 0
        self.ended = 0

    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None:
        assert request not in self.seen
        self.prompts[request] = list(prompt_ids)
        self.seen[request] = [prompt_ids[0]]
        self.features[request] = []

    def observe(
        self, request: Hashable, tokens: Sequence[int], features: torch.Tensor | None
    ) -> None:
        assert tokens
        self.seen[request] += tokens
        assert (features is None) == (not self.feature_layers)
        if features is not None:
            assert len(features) == len(tokens)
            self.features[request].append(features)

    def retract(self, request: Hashable, num_tokens: int) -> bool:
        assert 0 < num_tokens < len(self.seen[request])
        self.retracted += 1
        if not self._can_retract:
            return False
        del self.seen[request][-num_tokens:]
        if self.feature_layers:
            joined = torch.cat(self.features[request])
            self.features[request] = [joined[: len(joined) - num_tokens]]
        return True

    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[DraftTree]:
        return [self._tree(request, tree) for request in requests]

    def _tree(self, request: Hashable, tree: TreeConfig) -> DraftTree:
        seen, prompt = self.seen[request], self.prompts[request]
        assert seen[: len(prompt)] == prompt
        truth = self._truths.get(tuple(prompt), [])
        done = len(seen) - len(prompt)
        coming = truth[done : done + tree.depth]
        tokens, parents, last = [seen[-1]], [-1], 0
        for token in coming:
            siblings = [self._rng.randrange(VOCAB) for _ in range(tree.top_k - 1)]
            if self._rng.random() < self._right:
                siblings.insert(self._rng.randrange(len(siblings) + 1), token)
            else:
                siblings.append(self._rng.randrange(VOCAB))
            parent, last = last, -1
            for sibling in siblings:
                if len(tokens) == tree.rows:
                    return DraftTree(tokens, parents)
                tokens.append(sibling)
                parents.append(parent)
                if sibling == token or last < 0:
                    last = len(tokens) - 1
        return DraftTree(tokens, parents)

    def end(self, request: Hashable) -> None:
        self.ended += 1
        for held in (self.seen, self.prompts, self.features):
            held.pop(request, None)
