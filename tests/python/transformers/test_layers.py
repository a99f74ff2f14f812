"""Stand-ins for decoder layers: only where they give what the model's own layers give."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from nwor_specpv import NworConfig
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.layers import decoder
from nwor_specpv.transformers.layers.decoder import RowLayer
from nwor_specpv.transformers.request import Part, Request
from nwor_specpv.transformers.round import Round
from nwor_specpv.transformers.runner import ModelRunner
from tests.python.specpv.contexts import seeded
from tests.python.transformers.tiny_models import FAMILIES, decode_plainly, random_prompt, tiny

cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HALVES = (torch.float16, torch.bfloat16)


def replaced_layers(model: Any) -> list[int]:
    """Layers that are ours while the model is run."""
    with ModelRunner(model, NworConfig()).installed() as running:
        return [i for i, one in enumerate(running.model.layers) if isinstance(one, RowLayer)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_known_family_is_run_by_ours(family: str) -> None:
    model = tiny(family)
    assert replaced_layers(model) == [0, 1, 2]
    assert not any(isinstance(one, RowLayer) for one in model.modules())


def test_windows_are_those_of_each_layer() -> None:
    config = FAMILIES["qwen2"](use_sliding_window=True, max_window_layers=1)
    config.sliding_window = 8
    config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    torch.manual_seed(1)
    model = type(tiny("qwen2"))(config).eval()
    assert replaced_layers(model) == [0, 1, 2]
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
    with pytest.warns(UserWarning, match="LlamaDecoderLayer .* differs from what"):
        assert replaced_layers(model) == []
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
    assert replaced_layers(model) == [0, 2]
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.bias = nn.Parameter(torch.randn(64))
    assert replaced_layers(model) == [0]
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


class Adapted(nn.Module):
    """A linear layer and something beside it, as adapters are put there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.more = nn.Linear(base.in_features, base.out_features, bias=False)
        self.weight = base.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base(rows) + self.more(rows)


def adapt(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def adapt_head(model: PreTrainedModel) -> None:
    model.lm_head = Adapted(model.lm_head)


def replace_weight(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp.up_proj.weight = nn.Parameter(torch.randn(96, 64))


def replace_head(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn(96, 64))


def hook_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, rows, out: -out)


def own_forward(model: PreTrainedModel) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda rows: -forward(rows)


@pytest.mark.parametrize(
    "change", [adapt, adapt_head, replace_weight, replace_head, hook_head, own_forward]
)
def test_a_model_that_changed_after_the_first_call_is_run_as_it_is(change: Any) -> None:
    torch.manual_seed(2)
    model = copy.deepcopy(tiny())
    generator = Generator(model, drafter="none")
    before = generator.generate([1, 2, 3], 8).token_ids
    change(model)
    generator.forget()
    truth = decode_plainly(model, [1, 2, 3], 8)
    assert truth != before
    assert generator.generate([1, 2, 3], 8).token_ids == truth


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every call of ours from now on."""
    counts: list[int] = []
    op = decoder._attention_inputs

    def counted(rows: torch.Tensor, *more: Any) -> Any:
        counts.append(rows.shape[0])
        return op(rows, *more)

    monkeypatch.setattr(decoder, "_attention_inputs", counted)
    return counts


def test_many_rows_are_left_to_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny(), [1 + i % 90 for i in range(100)]
    counts = count_calls(monkeypatch)
    result = Generator(model, drafter="none").generate(prompt, 5)
    assert result.token_ids == decode_plainly(model, prompt, 5)
    assert set(counts) == {1, 3}  # steps, and the one trial of three rows


def test_other_types_are_left_alone() -> None:
    model = copy.deepcopy(tiny())
    model.model.layers[1].input_layernorm.bfloat16()
    assert replaced_layers(model) == [0, 2]
    assert replaced_layers(model.to(torch.bfloat16)) == []


def test_a_layer_with_a_forward_of_its_own_is_left_alone() -> None:
    """As libraries put it there that move weights about."""
    model = copy.deepcopy(tiny())
    projection = model.model.layers[0].mlp.up_proj
    own = projection.forward
    projection.forward = lambda rows: own(rows)
    assert replaced_layers(model) == [1, 2]


# ---- CUDA ----------------------------------------------------------------------------------------


@cache
def on_cuda(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """With heads that the attention kernels have."""
    config = FAMILIES[family]()
    config.head_dim = 64
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to("cuda", dtype).eval()


def logits_of(model: PreTrainedModel, prompt: list[int], *, ours: bool) -> torch.Tensor:
    """Of all rows of a prompt, in one pass."""
    runner = ModelRunner(model, NworConfig())
    runner.reserve(len(prompt))
    request = Request(runner.new_key(), 0, list(prompt), len(prompt), 1, 0, 0)
    runner.cache.allocator.extend(request.key, len(prompt))
    part = Part(request, prompt[:-1], prompt[-1:], [-1], 0)
    part.want_fed_logits = True
    with runner.installed() as running:
        if not ours:
            for name, layer in running.model.layers._modules.items():
                running.model.layers._modules[name] = getattr(layer, "layer", layer)
        round_ = Round(runner, [part])
        round_.run(None, 1)
        round_.commit([[]])
    return round_.logits.double()


@cuda_only
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_cuda_layers_are_ours_and_as_near_to_the_truth(family: str, dtype: torch.dtype) -> None:
    prompt = random_prompt(seeded(), 30, 70)
    model = on_cuda(family, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that ours are something else
        assert replaced_layers(model) == [0, 1, 2]
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        truth = wide(torch.tensor([prompt], device="cuda")).logits[0]
    ours, theirs = (
        ((logits_of(model, prompt, ours=own) - truth).norm() / truth.norm())
        for own in (True, False)
    )
    assert ours <= 1.5 * theirs + 1e-5, (ours, theirs)


@cuda_only
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_cuda_layers_that_are_hooked_or_changed_are_left_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(on_cuda("llama", dtype))
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert replaced_layers(model) == [0, 2]
    handle.remove()
    kind = type(model.model.layers[0])
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *a, **more: own(self, *a, **more) * 1.25)
    with pytest.warns(UserWarning, match="LlamaDecoderLayer .* differs from what"):
        assert replaced_layers(model) == []


@cuda_only
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_cuda_graphs_are_captured_through_ours(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = seeded()
    model = on_cuda("llama", dtype)
    prompts = [random_prompt(rng, 30, 70) for _ in range(3)]
    counts = count_calls(monkeypatch)
    generator = Generator(model, drafter="ngram", cuda_graphs=True)
    tree = TreeConfig(rows=4, depth=3, top_k=1)
    result = generator.generate(prompts, 40, tree=tree)
    assert result.stats.graph_replays > 10
    called = len(counts)
    again = generator.generate(prompts, 40, tree=tree)  # prefixes are kept, graphs are there
    if dtype == torch.float32:
        assert again.token_ids == result.token_ids
    replayed, launched = again.stats.graph_replays, (len(counts) - called) // 3
    assert replayed > launched
