"""The wrapped methods of model runners and workers, on ones made up with vLLM's signatures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv.vllm import registry
from nwor_specpv.vllm.hooks import runner as runner_hooks
from nwor_specpv.vllm.hooks import trees as tree_hooks

V1 = "vllm.v1.worker.gpu_model_runner"
V2 = "vllm.v1.worker.gpu.model_runner"
DRAFTS = torch.tensor([4, 0, 3, 4], dtype=torch.int32)


class RunnerV1:
    """Tells what was called, and when."""

    def __init__(self, calls: list[Any]) -> None:
        self.vllm_config, self.calls = object(), calls

    def _update_states_after_model_execute(self, output_token_ids, scheduler_output):
        self.calls.append("vllm")
        return "what vLLM returns"


class RunnerV2:
    def __init__(self, calls: list[Any]) -> None:
        self.vllm_config, self.calls = object(), calls

    def postprocess_sampled(
        self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc
    ):
        self.calls.append("vllm")
        return "what vLLM returns"


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Fresh classes in the modules where vLLM has them."""
    found = {}
    for path, runner in ((V1, RunnerV1), (V2, RunnerV2)):
        module = ModuleType(path)
        found[path] = module.GPUModelRunner = type("GPUModelRunner", (runner,), dict(vars(runner)))
        monkeypatch.setitem(sys.modules, path, module)
    return found


class Listener:
    """Stands for an engine: what it was told."""

    def __init__(self, calls: list[Any], off: str | None = None) -> None:
        self.calls, self.off, self.runner = calls, off, None

    def attach(self, runner: Any) -> None:
        self.runner = runner

    def finish(self, accepted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.calls.append(accepted(DRAFTS).tolist())


def call(runner: Any) -> Any:
    """A step in which all, none, two and none of the drafts are accepted."""
    if hasattr(runner, "postprocess_sampled"):
        rejected = torch.tensor([0, 0, 1, 4])
        return runner.postprocess_sampled(None, None, None, rejected, None)
    sampled = torch.full((4, 5), -1)
    for request, count in enumerate((5, 1, 3, 1)):
        sampled[request, :count] = 7
    return runner._update_states_after_model_execute(sampled, SimpleNamespace())


@pytest.mark.parametrize("path", [V1, V2], ids=["v1", "v2"])
def test_the_commit_comes_before_vllms_own_method(
    path: str, runners: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # the second time nothing is wrapped again
        assert runner_hooks.install() is None
    calls: list[Any] = []
    runner, listener = runners[path](calls), Listener(calls)
    monkeypatch.setattr(registry, "find_engine", lambda _: listener)
    assert call(runner) == "what vLLM returns"
    assert calls == [[4, 0, 2, 0], "vllm"]
    assert listener.runner is runner


@pytest.mark.parametrize("path", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("off", [True, False], ids=["off", "unknown"])
def test_an_engine_that_does_not_stage_is_not_told(
    path: str, off: bool, runners: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner_hooks.install() is None
    calls: list[Any] = []
    listener = Listener(calls, "refused") if off else None
    monkeypatch.setattr(registry, "find_engine", lambda _: listener)
    assert call(runners[path](calls)) == "what vLLM returns"
    assert calls == ["vllm"]


@pytest.mark.parametrize("path", [V1, V2], ids=["v1", "v2"])
def test_a_method_that_vllm_changed_is_not_wrapped(path: str, runners: dict[str, type]) -> None:
    def changed(self: Any, tokens: Any) -> None: ...

    runner = runners[path]
    name = {V1: "_update_states_after_model_execute", V2: "postprocess_sampled"}[path]
    setattr(runner, name, changed)
    problem = runner_hooks.install()
    assert problem is not None
    assert "takes (self, tokens), expected (self, " in problem
    assert getattr(runner, name) is changed


def test_a_method_that_is_gone_is_told(runners: dict[str, type]) -> None:
    sys.modules[V2].GPUModelRunner = object
    problem = runner_hooks.install()
    assert problem is not None
    assert f"this vLLM has no {V2}.GPUModelRunner.postprocess_sampled" in problem


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("case", ["plain", "drafts", "unknown", "a head"])
def test_a_plain_step_has_no_speculator(
    case: str, fails: bool, runners: dict[str, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample_tokens(self, grammar_output):
        self.calls.append((self.speculator, self.num_speculative_steps, grammar_output))
        if fails:
            raise RuntimeError
        return "what vLLM returns"

    runners[V2].sample_tokens = sample_tokens
    for _ in range(2):  # the second time nothing is wrapped again
        assert runner_hooks.install_idle() is None
    found = None if case == "unknown" else SimpleNamespace(plain_step=case != "drafts")
    monkeypatch.setattr(registry, "find_engine", lambda _: found)
    speculator = SimpleNamespace() if case == "a head" else SimpleNamespace(idles=True)
    runner = runners[V2]([])
    runner.speculator, runner.num_speculative_steps = speculator, 16
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        assert runner.sample_tokens("grammar") == "what vLLM returns"
    expected = (None, 0) if case == "plain" else (speculator, 16)
    assert runner.calls == [(*expected, "grammar")]
    assert (runner.speculator, runner.num_speculative_steps) == (speculator, 16)


class Worker:
    """Starts an engine: tells what was called, and when."""

    def __init__(self, calls: list[Any], **runner: Any) -> None:
        self.vllm_config, self.calls = object(), calls
        self.model_runner = SimpleNamespace(**runner)

    def compile_or_warm_up_model(self):
        self.calls.append("vllm")
        return "what vLLM returns"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type:
    """A fresh class in a module of its own."""
    module = ModuleType("theirs.worker")
    module.Worker = type("Worker", (Worker,), dict(vars(Worker)))
    monkeypatch.setitem(sys.modules, "theirs.worker", module)
    return module.Worker


@pytest.mark.parametrize("kind", ["drafter", "speculator"])
@pytest.mark.parametrize("case", ["ours", "another mode", "unknown"])
def test_drafting_starts_after_vllms_warm_up(
    kind: str, case: str, worker: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):  # the second time nothing is wrapped again
        assert runner_hooks.install_start("theirs.worker.Worker") is None
    calls: list[Any] = []
    ours = SimpleNamespace(start=lambda: calls.append("start"))
    lengths = object() if kind == "speculator" else None
    found = SimpleNamespace(lossless=case == "ours", lengths=lengths)
    monkeypatch.setattr(registry, "find_engine", lambda _: None if case == "unknown" else found)
    made = worker(calls, **{kind: ours})
    assert made.compile_or_warm_up_model() == "what vLLM returns"
    assert calls == (["vllm", "start"] if case == "ours" else ["vllm"])


@pytest.mark.parametrize("case", ["ours", "the user has said", "unknown"])
def test_caches_leave_room_for_views(
    case: str, worker: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(left_for_caches=lambda available: available - 300)

    def measure(self: Any) -> int:
        assert case == "unknown" or found.sizes_caches
        return 1000

    worker.determine_available_memory = measure
    for _ in range(2):
        assert runner_hooks.install_memory("theirs.worker.Worker") is None
    monkeypatch.setattr(registry, "find_engine", lambda _: None if case == "unknown" else found)
    made = worker([])
    said = 1000 if case == "the user has said" else None
    made.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=said))
    assert made.determine_available_memory() == (700 if case == "ours" else 1000)
    assert case == "unknown" or not found.sizes_caches


def test_a_worker_that_vllm_changed_is_not_wrapped(worker: type) -> None:
    problem = runner_hooks.install_start("theirs.worker.Another")
    assert problem is not None
    assert "this vLLM has no theirs.worker.Another.compile_or_warm_up_model" in problem

    def changed(self: Any, sizes: Any) -> None: ...

    worker.compile_or_warm_up_model = changed
    problem = runner_hooks.install_start("theirs.worker.Worker")
    assert problem is not None
    assert "takes (self, sizes), expected (self)" in problem
    assert worker.compile_or_warm_up_model is changed


# ---- vLLM's warm-up of model runner V2 ----


@pytest.mark.parametrize(("room", "requests"), [(0, 32), (512, 8), (2048, 32), (16, 1)])
def test_the_warm_up_has_no_more_rows_than_a_step(
    monkeypatch: pytest.MonkeyPatch, room: int, requests: int
) -> None:
    """Where measured speed decides, a full batch never has the largest trees. `room` 0: it does
    not decide."""
    config = SimpleNamespace(max_num_seqs=32)
    runner = SimpleNamespace(vllm_config=object(), scheduler_config=config, decode_query_len=64)
    monkeypatch.setattr(registry, "find_engine", lambda _: SimpleNamespace(tree_room=room))
    seen = []

    def fails(model_runner: Any, *calls: Any) -> None:
        seen.append((model_runner.scheduler_config.max_num_seqs, calls))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        tree_hooks._warming(fails)(runner, "execute", "sample")
    assert seen == [(requests, ("execute", "sample"))]
    assert config.max_num_seqs == 32
