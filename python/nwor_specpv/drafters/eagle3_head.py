"""The EAGLE3 head: one decoder layer over fused features of the target and its own outputs.

An entry is a pair: the target's features at a row, and the token that follows that row. From an
entry the head guesses the token after. Its output replaces the features of the next entry, so the
head can continue alone. Embedding and output matrix are the target's.

    hidden = head.fuse(features)                 # or an earlier output
    query, key, value = head.project(embeddings, hidden)
    output = head.finish(hidden, attended)       # attended by the caller: training or drafting
    scores = head.normalize(output) @ output_matrix.T
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from nwor_specpv.errors import NworError
from nwor_specpv.models.weights import load_weights, save_weights


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_vocabulary: int
    feature_layers: tuple[int, ...]  # layers of the target whose outputs are fused
    window: int  # the most entries that an entry attends to
    rope_theta: float
    norm_epsilon: float
    feature_norm: bool = True  # each layer's features are normalised before they are fused
    norm_before_residual: bool = False  # the layer's residual is its normalised input

    def __post_init__(self) -> None:
        def require(name: str, right: bool, expected: str) -> None:
            if not right:
                raise NworError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        for name in ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim"):
            require(name, _whole(getattr(self, name), 1), "a whole number, 1 or more")
        for name in ("target_vocabulary", "window"):
            require(name, _whole(getattr(self, name), 1), "a whole number, 1 or more")
        multiple = f"a multiple of num_kv_heads, which is {self.num_kv_heads}"
        require("num_heads", self.num_heads % self.num_kv_heads == 0, multiple)
        require("head_dim", self.head_dim % 2 == 0, "an even number")
        right = bool(self.feature_layers) and all(_whole(i, 0) for i in self.feature_layers)
        require("feature_layers", right, "one layer or more, each a whole number, 0 or more")
        for name in ("rope_theta", "norm_epsilon"):
            value = getattr(self, name)
            right = isinstance(value, int | float) and not isinstance(value, bool)
            require(name, right and 0 < value < math.inf, "a finite number above 0")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The size of every weight."""
        hidden, layers = self.hidden, len(self.feature_layers)
        norms = {"feature_norm": (layers, hidden)} if self.feature_norm else {}
        return norms | {
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
    """The weights of a head and its computations. Training passes weights with gradients."""

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
            _require_finite(name, weights[name])
        self.shape, self.weights = shape, dict(weights)
        self.linear = linear  # a drafter replaces it for few rows
        # [draft vocabulary], the most frequent first
        self.draft_to_target = _checked_ids(draft_to_target, shape.target_vocabulary)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Eagle3Head:
        # No checks: training calls this at every update, and a check would wait for the device.
        made = copy.copy(self)
        made.weights = {name: weight.to(device, dtype) for name, weight in self.weights.items()}
        made.draft_to_target = self.draft_to_target.to(device)
        return made

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[.., layers * hidden] of the target -> [.., hidden]."""
        if self.shape.feature_norm:
            parts = features.unflatten(-1, self.weights["feature_norm"].shape)
            features = (self._norm(parts, None) * self.weights["feature_norm"]).flatten(-2)
        return self.linear(features, self.weights["fuse"])

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
        hidden = self.residual(hidden) + self.linear(attended, self.weights["attention_output"])
        normed = self._norm(hidden, self.weights["mlp_norm"])
        gate, up = self.linear(normed, self.weights["gate_up"]).chunk(2, dim=-1)
        return hidden + self.linear(silu(gate) * up, self.weights["down"])

    def residual(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer's input adds to its output."""
        if self.shape.norm_before_residual:
            return self._norm(hidden, self.weights["hidden_norm"])
        return hidden

    def normalize(self, output: torch.Tensor) -> torch.Tensor:
        """Returns what the target's output matrix is multiplied with."""
        return self._norm(output, self.weights["norm"])

    def rotation(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rotation(num_positions, self.shape.head_dim, self.shape.rope_theta)

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16, **metadata: str) -> None:
        tensors = {name: weight.detach().to(dtype) for name, weight in self.weights.items()}
        tensors["draft_to_target"] = self.draft_to_target.to(torch.int32)
        shape = json.dumps(dataclasses.asdict(self.shape))
        save_weights(path, tensors, {"format": "pt", "eagle3": shape, **metadata})

    @classmethod
    def load(cls, path: Path) -> Eagle3Head:
        tensors, metadata = load_weights(path)
        try:
            fields = json.loads(metadata["eagle3"])
            fields["feature_layers"] = tuple(fields["feature_layers"])
            shape = HeadShape(**fields)
            return cls(shape, tensors, tensors.pop("draft_to_target"))
        except (KeyError, TypeError, ValueError) as error:
            raise NworError(f"{path}: not an EAGLE3 head: {error}") from None

    def _norm(self, values: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rms_norm(values, values.shape[-1:], weight, self.shape.norm_epsilon)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require_finite(name: str, weight: torch.Tensor) -> None:
    finite = weight.isfinite()
    if not bool(finite.all()):
        wrong = int((~finite).sum())
        raise NworError(
            f"weight {name}: got {wrong} of {weight.numel()} values not finite, expected none"
        )


def _checked_ids(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Returns the ids as int64, since torch takes uint8 for a mask; raises on wrong ids."""
    if not isinstance(ids, torch.Tensor):
        raise NworError(f"draft_to_target: got {type(ids).__name__}, expected a tensor")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise NworError(f"draft_to_target: got {ids.dtype}, expected whole numbers")
    if ids.dim() != 1 or not len(ids):
        got = list(ids.shape)
        raise NworError(f"draft_to_target: got sizes {got}, expected [draft vocabulary], not empty")
    ids = ids.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise NworError(
            f"draft_to_target: got ids from {low} to {high}, expected 0 to {vocabulary - 1}"
        )
    tokens = len(ids.unique())
    if tokens != len(ids):
        raise NworError(
            f"draft_to_target: got {len(ids)} ids of {tokens} tokens, expected each token once"
        )
    return ids


def rotation(num_positions: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [num_positions, head_dim] of rotary positions, for rotated halves."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * theta**-steps
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions to [.., D]; `cos` and `sin` broadcast."""
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat([-second, first], dim=-1) * sin
