"""Steps with hits of the prefix cache, on runners made up with vLLM's signatures."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nwor_specpv.vllm import registry
from nwor_specpv.vllm.hooks import prefix_hits
from nwor_specpv.vllm.versions.adapter import RUNNER_V1 as V1
from nwor_specpv.vllm.versions.adapter import RUNNER_V2 as V2


class RunnerV1:
    """Answers for a batch of four requests with five rows each."""

    vllm_config = object()

    def _update_states(self, scheduler_output):
        return "what vLLM returns"

    @staticmethod
    def _is_uniform_decode(
        max_num_scheduled_tokens,
        uniform_decode_query_len,
        num_tokens,
        num_reqs,
        force_uniform_decode=None,
    ):
        return True if force_uniform_decode is None else force_uniform_decode

    def ask(self, **forced: Any) -> Any:
        sizes = {"max_num_scheduled_tokens": 5, "uniform_decode_query_len": 5}
        return self._is_uniform_decode(**sizes, num_tokens=20, num_reqs=4, **forced)


class RunnerV2:
    vllm_config = object()

    def add_requests(self, scheduler_output):
        return "what vLLM returns"

    def ask(self) -> Any:
        return sys.modules[V2].get_uniform_token_count(4, 20, 5)


def get_uniform_token_count(num_reqs, num_tokens, max_query_len):
    return max_query_len


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for an engine; classes are fresh in the modules where vLLM has them."""
    for path, runner in ((V1, RunnerV1), (V2, RunnerV2)):
        module = ModuleType(path)
        module.GPUModelRunner = type("GPUModelRunner", (runner,), dict(vars(runner)))
        monkeypatch.setitem(sys.modules, path, module)
    sys.modules[V2].get_uniform_token_count = get_uniform_token_count
    found = SimpleNamespace(off=None, prefix_hits=False)
    monkeypatch.setattr(registry, "find_engine", lambda _: found)
    return found


def plan(
    *, rows: int = 4, hits: tuple[int, ...] = (), resumed: tuple[str, ...] = ()
) -> SimpleNamespace:
    """Of a step of so many requests; those that begin have `hits` tokens in the cache."""
    return SimpleNamespace(
        num_scheduled_tokens={str(i): 5 for i in range(rows)},
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=count) for count in hits],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (plan(), False),
        (plan(hits=(0, 0)), False),
        (plan(hits=(0, 16)), True),
        (plan(resumed=("2",)), True),
        (plan(rows=1, hits=(16,)), False),
    ],
    ids=["decodes", "no hit", "a hit", "resumed", "alone"],
)
@pytest.mark.parametrize("path", [V1, V2], ids=["v1", "v2"])
def test_a_step_with_hits_is_not_uniform(
    path: str, step: SimpleNamespace, expected: bool, listener: SimpleNamespace
) -> None:
    for _ in range(2):  # the second time nothing is wrapped again
        assert prefix_hits.install() is None
    runner = sys.modules[path].GPUModelRunner()
    tell = runner._update_states if path == V1 else runner.add_requests
    assert tell(step) == "what vLLM returns"
    assert listener.prefix_hits is expected
    assert bool(runner.ask()) is not expected
    assert runner.ask(), "a dummy step, without a plan"
    tell(plan())
    assert not listener.prefix_hits


def test_an_answer_that_is_forced_stays(listener: SimpleNamespace) -> None:
    """Captured graphs are of the kind that the runner wants."""
    assert prefix_hits.install() is None
    runner = sys.modules[V1].GPUModelRunner()
    runner._update_states(plan(hits=(16,)))
    assert runner.ask(force_uniform_decode=True) is True


@pytest.mark.parametrize("path", [V1, V2], ids=["v1", "v2"])
def test_an_engine_that_does_not_stage_keeps_its_graphs(
    path: str, listener: SimpleNamespace
) -> None:
    assert prefix_hits.install() is None
    listener.off = "refused"
    runner = sys.modules[path].GPUModelRunner()
    tell = runner._update_states if path == V1 else runner.add_requests
    tell(plan(hits=(16,)))
    assert runner.ask()
    assert not listener.prefix_hits


def test_what_vllm_changed_is_not_wrapped(listener: SimpleNamespace) -> None:
    def changed(num_reqs: int) -> None: ...

    sys.modules[V2].get_uniform_token_count = changed
    problem = prefix_hits.install()
    assert problem is not None
    assert "takes (num_reqs), expected (num_reqs, num_tokens, max_query_len)" in problem
    assert sys.modules[V2].get_uniform_token_count is changed
    del sys.modules[V2].get_uniform_token_count
    assert f"this vLLM has no {V2}.get_uniform_token_count" in prefix_hits.install()
