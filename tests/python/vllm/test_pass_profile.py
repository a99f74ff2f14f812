"""benchmarks/vllm/pass_profile.py without an engine: parts and groups of kernels, arms, table."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv.config import Settings
from nwor_specpv.vllm.specpv.lengths import Lengths

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    for folder in ("tools", "benchmarks/vllm"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    before = set(sys.modules)
    profile = importlib.import_module("pass_profile")
    table = importlib.import_module("tables.pass_profile")
    yield SimpleNamespace(profile=profile, table=table)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith((str(ROOT / "tools"), str(ROOT / "benchmarks"))):
            del sys.modules[name]


def part(name: str, ts: float, dur: float) -> dict[str, Any]:
    mark = {"ph": "X", "cat": "user_annotation", "name": f"nwor_part {name}"}
    return mark | {"ts": ts, "dur": dur}


def launched(number: int, at: float, *kernels: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Kernels of one launch, a graph's among them: name, begin, duration."""
    told = {"args": {"correlation": number}}
    call = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": at, "dur": 1.0}
    work = ({"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels)
    return [call | told, *(one | told for one in work)]


def test_kernels_belong_to_the_innermost_part_that_launched_them(modules: SimpleNamespace) -> None:
    events = [part("propose", 10, 50), part("later", 20, 10), part("verify", 100, 10)]
    events += launched(1, 12, ("k1", 200, 4))  # in propose alone
    events += launched(2, 25, ("k2", 210, 8))  # in later, which propose holds
    events += launched(3, 101, ("k3", 216, 8))  # in verify, beside the one before for 2
    events += launched(4, 300, ("k4", 230, 1))  # in none
    found = modules.profile.by_part(events, steps=2)
    parts = found["parts"]
    assert found["span_us"] == 31 / 2
    busy = {name: (one["us"], one["idle_us"]) for name, one in parts.items()}
    assert busy == {"propose": (2, 0), "later": (4, 3), "verify": (3, 0), "host": (0.5, 3)}
    assert parts["later"]["kernels"] == {"k2": [0.5, 4.0]}
    assert parts["later"]["times_per_step"] == 0.5


GEMM = "nvjet_tst_128x64"


def test_the_last_product_of_a_pass_are_logits(modules: SimpleNamespace) -> None:
    """Of a pass in a graph; vLLM's sampler has no other products."""
    events = [part("first", 0, 5), part("later", 10, 5), part("verify", 20, 5)]
    events += [part("sample", 30, 5)]
    view = "void nwor_specpv::(anonymous namespace)::VerifyKernel<Traits>(VerifyArgs)"
    for number, name in enumerate(("first", "later", "verify", "sample")):
        at, ts = 10 * number, 100 + 10 * number
        kernels = [(GEMM, ts, 1), (view, ts + 1, 2), (GEMM, ts + 3, 3), ("norm", ts + 6, 1)]
        events += launched(number, at + 1, *kernels)
        found = modules.profile.by_part(events, steps=1)["parts"][name]["groups"]
        if name == "sample":
            assert found == {"logits": 4, "attention": 2, "sampling": 1}
        elif name == "verify":
            assert found == {"products": 4, "attention": 2, "rest": 1}
        else:
            assert found == {"products": 1, "attention": 2, "logits": 3, "rest": 1}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("attention", "cutlass::device_kernel<flash::FlashAttnFwdSm90<T> >"),
        ("attention", "nwor_specpv::MergeRowsKernel<T>"),
        ("writes", "void vllm::reshape_and_cache_flash_kernel<T>"),
        ("writes", "nwor_specpv::StageKernel(StageTable)"),
        ("choice", "nwor_specpv::(anonymous namespace)::TensorScoreKernel<4>"),
        ("choice", "nwor_specpv::BuildViewKernel(ViewParams)"),
        ("lookup", "nwor_specpv::ScanKernel(NgramLookupParams)"),
        ("rest", "at_cuda_detail::cub::DeviceScanKernel<T>"),
        ("sampling", "void at::native::reduce_kernel<512, 1, ReduceOp<T, ArgMaxOps<float> > >"),
        ("sampling", "_compute_local_logits_stats_kernel"),
        ("products", "cutlass::device_kernel<GemmUniversal>"),
        ("products", "void cublasLt::splitKreduce_kernel<32>"),
        ("rest", "triton_red_fused_add_mean_mul_pow_rsqrt_0"),
    ],
)
def test_kernels_have_groups(modules: SimpleNamespace, group: str, name: str) -> None:
    assert modules.profile.group_of(name, "verify") == group


def test_every_arm_that_is_profiled_has_graphs(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lengths, "drafts", Lengths.drafts)  # put back afterwards
    modules.profile.offer_drafts([0, 12])
    assert Lengths(Settings(enable_specpv=True), 16).drafts == (0, 4, 8, 12, 16)


def test_a_step_is_of_the_arm_that_was_asked_for(modules: SimpleNamespace) -> None:
    decisions = SimpleNamespace()
    core = SimpleNamespace(scheduler=SimpleNamespace(decisions=decisions))
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    for passes, drafts in ((2, 8), (0, 0)):
        modules.profile.take(SimpleNamespace(llm_engine=engine), passes, drafts)
        assert decisions.fixed_arm(30_000) == (drafts, passes)


def test_the_table_has_all_of_a_step(modules: SimpleNamespace) -> None:
    parts = {
        "verify": {"us": 3000.0, "groups": {"attention": 2000.0, "writes": 1000.0}},
        "sample": {"us": 500.0, "groups": {"logits": 400.0, "writes": 100.0}},
        "later": {"us": 1500.0, "groups": {"attention": 500.0, "logits": 700.0, "choice": 300.0}},
        "host": {"us": 100.0, "groups": {"rest": 100.0}},
    }
    arm = {"passes": 2, "drafts": 8, "temperature": 0.0, "tokens_per_step": 6.5, "step_ms": 6.0}
    data = {"model": "M", "cell": "24x30720", "device": "d", "vllm": "v", "commit": "c"}
    lines = list(modules.table.result_lines(data | {"arms": [arm | {"parts": parts}]}))
    cells = lines[-1].strip("| ").split(" | ")
    assert cells[:5] == ["0", "2", "9", "6.50", "6.00"]
    assert sum(map(float, cells[5:])) == pytest.approx(6.0)
    columns = lines[2].strip("| ").split(" | ")
    told = dict(zip(columns, cells, strict=True))
    assert told["verify: attention"] == "2.00"
    assert told["logits, sampler"] == "0.50"
    assert told["logits"] == "0.70"
    assert told["gaps"] == "0.90"
