"""The EAGLE3 head: one decoder layer over fused features of the target and its own outputs.

An entry is a pair: the target's features at a row, and the token that follows that row. From it the
head guesses the token after; its output stands in for the features of the next entry, so it can go
on alone. Embedding and output matrix are the target's own.

    hidden = head.fuse(features)                 # or an earlier output
    query, key, value = head.project(embeddings, hidden)
    output = head.finish(hidden, attended)       # attended by the caller: training or drafting
    scores = head.normalize(output) @ output_matrix.T
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, rms_norm, silu

from nwor_specpv.errors import NworError
from nwor_specpv.models import safetensors


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; what belongs to the target has the target's size."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_vocabulary: int
    feature_layers: tuple[int, ...]  # of the target, whose outputs are fused
    window: int  # entries that an entry attends to at most
    rope_theta: float
    norm_epsilon: float

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the head."""
        hidden, layers = self.hidden, len(self.feature_layers)
        return {
            "feature_norm": (layers, hidden),
            "fuse": (hidden, layers * hidden),
            "token_norm": (hidden,),
            "hidden_norm": (hidden,),
            "query_key_value": (self.query_size + 2 * self.kv_size, 2 * hidden),
            "attention_output": (hidden, self.query_size),
            "mlp_norm": (hidden,),
            "gate_up": (2 * self.intermediate, hidden),
            "down": (hidden, self.intermediate),
            "norm": (hidden,),
        }


class Eagle3Head:
    """The weights and what is computed with them. Training passes weights that need gradients."""

    def __init__(
        self,
        shape: HeadShape,
        weights: Mapping[str, torch.Tensor],
        draft_to_target: torch.Tensor,
    ) -> None:
        for name, size in shape.sizes().items():
            got = tuple(weights[name].shape) if name in weights else None
            if got != size:
                raise NworError(f"weight {name}: got sizes {got}, expected {size}")
        self.shape, self.weights = shape, dict(weights)
        self.linear = linear  # a drafter with few rows has a faster one
        self.draft_to_target = draft_to_target  # [draft vocabulary], the most frequent first

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Eagle3Head:
        weights = {name: weight.to(device, dtype) for name, weight in self.weights.items()}
        return Eagle3Head(self.shape, weights, self.draft_to_target.to(device))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[.., layers * hidden] of the target -> [.., hidden]."""
        parts = features.unflatten(-1, self.weights["feature_norm"].shape)
        parts = self._norm(parts, None) * self.weights["feature_norm"]
        return self.linear(parts.flatten(-2), self.weights["fuse"])

    def project(
        self, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [.., Hq, D], key and value [.., Hkv, D], not rotated yet."""
        shape = self.shape
        both = torch.cat(
            [
                self._norm(embeddings, self.weights["token_norm"]),
                self._norm(hidden, self.weights["hidden_norm"]),
            ],
            dim=-1,
        )
        projected = self.linear(both, self.weights["query_key_value"])
        sizes = [shape.query_size, shape.kv_size, shape.kv_size]
        query, key, value = (
            part.unflatten(-1, (-1, shape.head_dim)) for part in projected.split(sizes, dim=-1)
        )
        return query, key, value

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output from its input and what was attended to, [.., Hq * D]."""
        hidden = hidden + self.linear(attended, self.weights["attention_output"])
        normed = self._norm(hidden, self.weights["mlp_norm"])
        gate, up = self.linear(normed, self.weights["gate_up"]).chunk(2, dim=-1)
        return hidden + self.linear(silu(gate) * up, self.weights["down"])

    def normalize(self, output: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the target's output matrix."""
        return self._norm(output, self.weights["norm"])

    def rotation(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rotation(num_positions, self.shape.head_dim, self.shape.rope_theta)

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16, **metadata: str) -> None:
        tensors = {name: weight.detach().to(dtype) for name, weight in self.weights.items()}
        tensors["draft_to_target"] = self.draft_to_target.to(torch.int32)
        shape = json.dumps(dataclasses.asdict(self.shape))
        safetensors.save(path, tensors, {"format": "pt", "eagle3": shape, **metadata})

    @classmethod
    def load(cls, path: Path) -> Eagle3Head:
        tensors, metadata = safetensors.load(path)
        try:
            fields = json.loads(metadata["eagle3"])
            fields["feature_layers"] = tuple(fields["feature_layers"])
            shape = HeadShape(**fields)
            draft_to_target = tensors.pop("draft_to_target").to(torch.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise NworError(f"{path}: not an EAGLE3 head: {error}") from None
        return cls(shape, tensors, draft_to_target)

    def _norm(self, values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(values, values.shape[-1:], weight, self.shape.norm_epsilon)


def rotation(num_positions: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [num_positions, head_dim] of rotary positions, halves against halves."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * theta**-steps
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [.., D]; `cos` and `sin` broadcast against it."""
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat([-second, first], dim=-1) * sin
