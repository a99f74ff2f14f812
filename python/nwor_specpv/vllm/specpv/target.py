"""The target model as a drafter: runs partial passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from vllm.forward_context import set_forward_context

from nwor_specpv.errors import NworError
from nwor_specpv.vllm.backend.caches import views_of
from nwor_specpv.vllm.backend.layer import TargetLayer

from .partial_pass import PartialPass


def own_layers(layers: Mapping[str, Any], besides: Collection[str] = ()) -> list[str]:
    """The target's layers, all of which must be ours: nobody else reads views.

    `besides`: layers of a drafter, which are vLLM's own.
    """
    names = [
        name for name, layer in layers.items() if hasattr(layer, "impl") and name not in besides
    ]
    theirs = [name for name in names if not isinstance(layers[name].impl, TargetLayer)]
    if theirs or not names:
        raise NworError(
            f"nwor_specpv, enable_specpv: {theirs[0] if theirs else 'the target'} uses vLLM's own "
            "attention, but views need ours in every layer of the target; add --attention-backend "
            "CUSTOM, or serve this model without enable_specpv"
        )
    return names


class TargetModel:
    """vLLM's own model, called outside of its steps."""

    def __init__(self, vllm_config: Any, model: Callable[..., Any], layers: list[str]) -> None:
        self._config = vllm_config
        self._model = model
        self.layers = layers
        self.layer_index = {name: index for index, name in enumerate(layers)}

    def key_caches(self) -> list[torch.Tensor]:
        """K of every layer, [P, S, Hkv, D] each; once vLLM has given them memory."""
        found = []
        for name, layer in self._attention():
            if layer.kv_cache.numel() == 0:
                raise NworError(f"layer {name}: vLLM has not made its KV cache yet")
            found.append(views_of(layer)[0][0])
        return found

    def key_scales(self) -> list[torch.Tensor]:
        """What K of every quantised layer is multiplied by; empty: none is quantised."""
        return [scales[0] for _, layer in self._attention() if (scales := views_of(layer)[1])]

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes K and V."""
        return self._config.model_config.dtype

    def _attention(self) -> Iterator[tuple[str, Any]]:
        context = self._config.compilation_config.static_forward_context
        return ((name, context[name]) for name in self.layers)

    def greedy(
        self, passed: PartialPass, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The likeliest next token after each row, [rows] int64.

        All ranks run it together, and all of them get the same: vLLM gathers the logits on each.
        """
        hidden, _ = self.forward(passed, tokens, positions)
        return self.logits(hidden).argmax(-1)

    def forward(
        self, passed: PartialPass, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Hidden states of each row, and those of inner layers where a head wants them."""
        metadata = dict.fromkeys(self.layers, passed)
        # Without slots vLLM writes nothing: K/V of these rows is kept in the tail alone.
        with set_forward_context(
            metadata, self._config, num_tokens=tokens.shape[0], slot_mapping={}
        ):
            found = self._model(input_ids=tokens.to(torch.int32), positions=positions)
        return found if isinstance(found, tuple) else (found, None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)
