"""Stand-ins for decoder layers: only where they give what the model's own layers give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from generate.tiny_models import FAMILIES, decode_plainly, tiny
from nwor_specpv import NworConfig
from nwor_specpv.transformers import Generator, layers
from nwor_specpv.transformers.layers import RowLayer
from nwor_specpv.transformers.runner import ModelRunner


def stand_ins(model: Any) -> list[int]:
    """Layers that are ours while the model is run."""
    with ModelRunner(model, NworConfig()).installed():
        return [i for i, one in enumerate(model.model.layers) if isinstance(one, RowLayer)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_known_family_is_run_by_ours(family: str) -> None:
    model = tiny(family)
    assert stand_ins(model) == [0, 1, 2]
    assert not any(isinstance(one, RowLayer) for one in model.modules())


def test_windows_are_those_of_each_layer() -> None:
    config = FAMILIES["qwen2"](use_sliding_window=True, max_window_layers=1)
    config.sliding_window = 8
    config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    torch.manual_seed(1)
    model = type(tiny("qwen2"))(config).eval()
    assert stand_ins(model) == [0, 1, 2]
    prompt = list(range(1, 40))
    assert Generator(model, drafter="none").generate(prompt, 20).token_ids == decode_plainly(
        model, prompt, 20
    )


@pytest.mark.parametrize("change", ["doubled", "shifted"])
def test_a_layer_that_computes_something_else_is_left_alone(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny())
    kind = type(model.model.layers[0])
    own = kind.forward

    def forward(self: nn.Module, hidden: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        out = own(self, hidden, *arguments, **more)
        return 2 * out if change == "doubled" else out + 0.01 * out.abs().max()

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.warns(UserWarning, match="LlamaDecoderLayer .* computes something else"):
        assert stand_ins(model) == []
    generator = Generator(model, drafter="none")
    with pytest.warns(UserWarning, match="the model's own layers run"):
        result = generator.generate([1, 2, 3], 8)
    assert result.token_ids == decode_plainly(model, [1, 2, 3], 8)


def test_what_is_added_to_a_layer_is_run() -> None:
    model = copy.deepcopy(tiny())

    class Scaled(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(rows)

    layer = model.model.layers[1]
    scaled = Scaled(64, 96, bias=False)
    scaled.weight = layer.mlp.up_proj.weight
    layer.mlp.up_proj = scaled
    assert stand_ins(model) == [0, 2]
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.bias = nn.Parameter(torch.randn(64))
    assert stand_ins(model) == [0]
    generator = Generator(model, drafter="none")
    assert generator.generate([5, 6], 8).token_ids == decode_plainly(model, [5, 6], 8)


def test_a_hook_is_called_for_every_step() -> None:
    """Also one that came after the first call."""
    model = copy.deepcopy(tiny())
    generator = Generator(model, drafter="none")
    generator.generate([1, 2, 3], 4)
    seen = []
    handle = model.model.layers[1].self_attn.register_forward_hook(
        lambda module, arguments, output: seen.append(output[0].shape[1])
    )
    generator.forget()
    generator.generate([1, 2, 3], 4)
    handle.remove()
    assert seen == [3, 1, 1, 1]
    generator.generate([1, 2, 3], 4)
    assert seen == [3, 1, 1, 1]


def test_many_rows_are_left_to_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny(), [1 + i % 90 for i in range(100)]
    counts = []
    op = layers._attention_inputs

    def counted(rows: torch.Tensor, *more: Any) -> Any:
        counts.append(rows.shape[0])
        return op(rows, *more)

    monkeypatch.setattr(layers, "_attention_inputs", counted)
    result = Generator(model, drafter="none").generate(prompt, 5)
    assert result.token_ids == decode_plainly(model, prompt, 5)
    assert set(counts) == {1, 3}  # steps, and the one trial of three rows


def test_other_types_are_left_alone() -> None:
    assert stand_ins(copy.deepcopy(tiny()).to(torch.bfloat16)) == []
