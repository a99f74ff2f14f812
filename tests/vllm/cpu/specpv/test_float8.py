"""Draft passes over float8 copies of the target's weights: what they draft may be other, what vLLM
says is not. Products are those of plain torch (`float8.py`)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.errors import NworError
from nwor_specpv.vllm.specpv.rules import DRAFTER
from support.engines import STOCK, check_drafting, draft_failures, drive, greedy, own_engine, start
from support.engines import stats as own_stats
from support.metric_counts import grown
from support.runner_v2_jobs import WITHOUT_HEAD, check, job, run
from support.small_views import SMALL_VIEW, prompts

SPECULATION = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}
FLOAT8 = {"specpv_draft_weights": "float8"}
VIEW = SMALL_VIEW | FLOAT8 | {"specpv_draft_passes": 3, "check_contract": True}
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return drive(start(STOCK, speculation=None), prompts(), greedy(MAX_TOKENS)).tokens


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def target_of(llm: Any) -> Any:
    return worker_of(llm).model_runner.drafter._target


def methods(target: Any) -> list[Any]:
    """How the model's layers multiply, and by what."""
    modules = [module for module in target._model.modules() if hasattr(module, "quant_method")]
    return [(id(one), id(one.quant_method), one.weight.data_ptr()) for one in modules]


def watch_products(target: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, bool]]:
    """How many layers have multiplied, by whether it was by copies and in a pass."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from nwor_specpv.vllm.specpv import draft_weights

    counts: Counter[tuple[bool, bool]] = Counter()
    forward, passing = target.forward, []
    multiply, apply = draft_weights.multiply, UnquantizedLinearMethod.apply

    def watched(*args: Any) -> Any:
        passing.append(None)
        try:
            return forward(*args)
        finally:
            passing.pop()

    def by_copies(*args: Any) -> Any:
        counts[True, bool(passing)] += 1
        return multiply(*args)

    def by_own(*args: Any) -> Any:
        counts[False, bool(passing)] += 1
        return apply(*args)

    monkeypatch.setattr(target, "forward", watched)
    monkeypatch.setattr(draft_weights, "multiply", by_copies)
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", by_own)
    return counts


@pytest.mark.quick
def test_output_is_plain_vllms_and_most_drafts_are_confirmed(
    expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Metrics().snapshot()
    llm = start(VIEW, speculation=SPECULATION)
    target = target_of(llm)
    held, counts = methods(target), watch_products(target, monkeypatch)
    assert drive(llm, prompts(), greedy(MAX_TOKENS)).tokens == expected
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)
    confirmed = grown(before, "specpv_confirmed_tokens_total")
    drafted = grown(before, "specpv_drafted_tokens_total")
    print(f"{confirmed} of {drafted} confirmed")
    assert confirmed > 0.5 * drafted > 0
    # Layers of passes by copies, output matrices behind them, and layers of full steps.
    assert set(counts) == {(True, True), (True, False), (False, False)}
    assert methods(target) == held


def test_copies_are_half_of_what_they_copy() -> None:
    """They are made with the model, not for the first pass: vLLM then counts what it takes."""
    from nwor_specpv.vllm.specpv.draft_weights import weights_of

    target = target_of(start(VIEW, speculation=SPECULATION, dtype="bfloat16"))
    weights = target._weights
    linear = [weights_of(layer) for layer, _ in weights._copies]
    assert len(linear) == 4 * len(target.layers) + 1  # and the output matrix
    scales = sum(4 * one.shape[0] for one in linear)
    assert weights.bytes == sum(one.nbytes for one in linear) // 2 + scales


def test_a_pass_that_fails_leaves_the_model_as_it_was(
    expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_specpv.vllm.specpv import draft_weights

    before = Metrics().snapshot()
    llm = start(VIEW, speculation=SPECULATION)
    target = target_of(llm)
    held, multiply, calls = methods(target), draft_weights.multiply, []

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) % 7 == 0:
            raise RuntimeError("injected")
        return multiply(*args)

    monkeypatch.setattr(draft_weights, "multiply", failing)
    assert drive(llm, prompts(), greedy(MAX_TOKENS)).tokens == expected
    assert draft_failures(before)["error"] > 3
    assert own_engine().violations == []
    assert methods(target) == held


def test_copies_follow_weights_that_are_loaded_again() -> None:
    """As RLHF does between steps. Copies keep their addresses, which graphs have."""
    from nwor_specpv.vllm.specpv.draft_weights import weights_of

    before = Metrics().snapshot()
    llm = start(VIEW, speculation=SPECULATION)
    copies = target_of(llm)._weights._copies
    old = [(copy.weights.data_ptr(), copy.scales.clone()) for _, copy in copies]
    worker_of(llm).reload_weights(weights_iterator=halved_weights(worker_of(llm)))
    for (layer, copy), (address, scales) in zip(copies, old, strict=True):
        assert copy.weights.data_ptr() == address
        torch.testing.assert_close(copy.scales, scales / 2)
        exact = weights_of(layer)
        assert (copy.weights.float() * copy.scales - exact).norm() < 0.05 * exact.norm()
    drive(llm, prompts()[:1], greedy(8))
    check_drafting(before)


def halved_weights(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the model's files."""
    from vllm.model_executor.model_loader import get_model_loader

    loader, config = get_model_loader(worker.vllm_config.load_config), worker.vllm_config
    given = loader.get_all_weights(config.model_config, worker.model_runner.get_model())
    return ((name, weight / 2) for name, weight in given)


def test_a_model_without_weights_to_copy_is_refused() -> None:
    from nwor_specpv.vllm.specpv.draft_weights import DraftWeights

    with pytest.raises(NworError, match="no linear layer"):
        DraftWeights(torch.nn.Sequential(torch.nn.Linear(4, 4)))


def test_operations_left_to_the_compiler_run_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run the model's own code, which nobody compiles: on a GPU."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.ir.op import IrOp
    from vllm.model_executor.layers.activation import SiluAndMul

    from nwor_specpv.vllm.specpv import draft_weights

    tried: list[list[str]] = []

    class Operation:
        impls = ("native", "vllm_c")

        def __init__(self, *priority: str) -> None:
            self.priority = list(priority)

        def get_priority(self) -> list[str]:
            return self.priority

        def set_priority(self, priority: list[str]) -> Any:
            tried.append(priority)
            return contextlib.nullcontext()

    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    for compiled in (False, True):
        with set_current_vllm_config(config):
            activation = SiluAndMul(compile_native=compiled)
        model = torch.nn.Sequential(activation, torch.nn.Linear(2, 2))
        assert draft_weights._left_to_compiler(model) == [activation]
        activation._forward_method = activation.forward_cuda  # as where it is not left to it
        assert draft_weights._left_to_compiler(model) == []
    operations = {"norm": Operation("native"), "mine": Operation("mine", "native")}
    monkeypatch.setattr(IrOp, "registry", operations)
    with contextlib.ExitStack() as stack:
        draft_weights._use_kernels(stack)
    assert tried == [["vllm_c", "native"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "lookups"])
def test_model_runner_v2_in_graphs(kind: str, tmp_path: Path, expected: dict) -> None:
    texts = [prompt + expected[str(i)] for i, prompt in enumerate(prompts())]
    told: dict[str, Any] = {"truth": texts} if kind == "head" else {"speculation": WITHOUT_HEAD}
    (found,) = run(tmp_path, job(FLOAT8, graphs=[6, 2, 1], params={"max_tokens": 24}, **told))
    name = {"head": "PartialViewSpeculator", "lookups": "SelfSpeculator"}[kind]
    check(found, speculator=name)
    assert found["tokens"] == [{name: tokens[:24] for name, tokens in expected.items()}]
    assert found["replays"] > 3 * found["proposals"]
    # Passes confirm more than a token each, and full steps most of what they drafted.
    assert found["tokens_per_pass"] > (1.5 if kind == "head" else 1.1)
    assert found["steps"][0] < 0.7 * 24
