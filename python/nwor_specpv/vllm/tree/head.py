"""vLLM's EAGLE head over the rows of growing trees."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import set_forward_context

from .level import TreeLevel


class TreeHead:
    """The head of one speculator, for one proposal of B requests. Writes no K/V."""

    def __init__(self, speculator: Any, count: int) -> None:
        self._speculator, self._count = speculator, count
        self._layers = sorted(speculator.draft_attn_layer_names)
        groups = speculator.kv_cache_config.kv_cache_groups
        group = next(i for i, one in enumerate(groups) if self._layers[0] in one.layer_names)
        self._table = speculator.block_tables.input_block_tables[group][:count]
        # Where the last token stands that the head has an entry of.
        self._last = speculator.input_buffers.positions[:count]
        self._prefix = (self._last + 1).to(torch.int32)

    def run(
        self, tokens: torch.Tensor, states: torch.Tensor, seen: torch.Tensor, levels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `growth.RunHead`."""
        spec, num_rows = self._speculator, tokens.shape[1]
        total = self._count * num_rows
        start = torch.arange(0, total + 1, num_rows, dtype=torch.int32, device=tokens.device)
        level = TreeLevel(self._table, self._prefix, start, seen.reshape(total, 1), num_rows)
        places = (self._last[:, None] + levels).clamp(max=spec.max_model_len - 1)
        with set_forward_context(
            dict.fromkeys(self._layers, level), spec.vllm_config, num_tokens=total, slot_mapping={}
        ):
            found = spec.model(
                input_ids=tokens.flatten().to(torch.int32),
                positions=places.flatten(),
                hidden_states=states.flatten(0, 1),
                inputs_embeds=None,
            )
        outputs, after = found if isinstance(found, tuple) else (found, found)
        shape = (self._count, num_rows, -1)
        return outputs.view(shape), after.view(shape)
