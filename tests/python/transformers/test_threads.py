"""Several threads with one model: Generators, shared caches and drafters, and the model itself."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nwor_specpv import NworConfig, NworError
from nwor_specpv.drafters import make_drafter
from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.runner import ModelRunner
from tests.python.transformers.tiny_models import TREES, decode_plainly, tiny

PROMPTS = [[5, 6, 7, 5, 6], [9, 8, 7, 9], [3, 1, 4, 1, 5]]


def run_all(works: list[Callable[[], Any]]) -> list[Any]:
    """Results of works that begin together; raises what one of them raised."""
    start, results = threading.Barrier(len(works)), [None] * len(works)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def state(model: Any) -> list:
    return [
        model.config._attn_implementation,
        model.training,
        [(name, id(module)) for name, module in model.named_modules()],
    ]


@pytest.mark.parametrize("kind", ["one", "several", "shared cache", "shared drafter"])
def test_three_threads_and_the_model_itself_beside_them(kind: str) -> None:
    model = copy.deepcopy(tiny("qwen2")).train()
    model.config.attention_dropout = 0.0
    first = Generator(model, drafter="ngram")
    if kind == "one":
        generators = [first] * 3
    elif kind == "several":
        generators = [first, *(Generator(model, drafter="ngram") for _ in range(2))]
    elif kind == "shared cache":
        generators = [first, *(Generator(drafter="ngram", cache_of=first) for _ in range(2))]
    else:
        drafter = make_drafter("ngram")
        generators = [Generator(model, drafter=drafter) for _ in range(3)]
    truths = [decode_plainly(model, prompt, 40) for prompt in PROMPTS]
    before = state(model)
    ids = torch.tensor([PROMPTS[0] * 8])
    with torch.no_grad():
        logits = model(ids).logits

    def generate(generator: Generator, prompt: list[int]) -> list:
        return [generator.generate(prompt, 40, tree=TREES["chain"]).token_ids for _ in range(3)]

    def call() -> list:
        with torch.no_grad():
            return [model(ids).logits for _ in range(40)]

    works = [
        functools.partial(generate, generator, prompt)
        for generator, prompt in zip(generators, PROMPTS, strict=True)
    ]
    *told, plain = run_all([*works, call])
    assert told == [[truth] * 3 for truth in truths]
    assert all(torch.equal(one, logits) for one in plain)
    assert state(model) == before


def test_a_call_inside_a_call_is_refused_and_another_generator_is_not() -> None:
    model = tiny()
    generator, other = Generator(model, drafter="none"), Generator(model, drafter="none")
    inside: list = []

    def again(token: int) -> None:
        with pytest.raises(NworError, match="generate: got a call from inside another one") as told:
            generator.generate([1, 2], 2)
        assert "\n" not in str(told.value)
        inside.append(other.generate([1, 2, 3], 4).token_ids)

    truth = decode_plainly(model, [1, 2, 3], 4)
    assert generator.generate([1, 2, 3], 4, on_token=again).token_ids == truth
    assert inside == [truth] * 4
    assert generator.generate([1, 2, 3], 4).token_ids == truth


def wrap(module: torch.nn.Module, kind: str) -> None:
    """Gives a module with children a `forward` of its own, as libraries do."""
    own = module.forward
    if kind == "closure":
        module.forward = lambda *given, **more: own(*given, **more)
    elif kind == "partial":
        module._old_forward = own

        def forward(module: torch.nn.Module, *given: Any, **more: Any) -> Any:
            return module._old_forward(*given, **more)

        module.forward = functools.partial(forward, module)
    else:
        module.forward = torch.compile(own, backend="eager")


@pytest.mark.parametrize("kind", ["closure", "partial", "compiled"])
def test_a_forward_of_its_own_is_run_with_our_attention(kind: str) -> None:
    model = copy.deepcopy(tiny())
    truth = decode_plainly(model, [1, 2, 3], 6)
    for module in (model, model.model.layers[1]):
        wrap(module, kind)
    assert Generator(model, drafter="none").generate([1, 2, 3], 6).token_ids == truth


def test_the_stand_in_is_made_again_only_when_the_model_has_changed() -> None:
    model = copy.deepcopy(tiny())
    runner = ModelRunner(model, NworConfig())

    def running() -> Any:
        with runner.installed() as made:
            return made

    first = running()
    assert running() is first
    model.train()
    assert running() is first
    assert not first.training
    assert not first.model.layers[0].training
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    second = running()
    assert second is not first
    handle.remove()
    model.model.layers[0].self_attn.scaling = 0.5
    third = running()
    assert third not in (first, second)
    assert third.config is not model.config
    assert third.get_input_embeddings().weight is model.get_input_embeddings().weight
