"""benchmarks/vllm/timeline.py on a made-up trace; the table and the drawing made of it."""

from __future__ import annotations

import importlib
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks" / "vllm"
BASE_NS = 1_700_000_000_000_000_000
STEP, LAYERS, LATE = 1000.0, 4, 300.0  # us; kernels run that much after their launch
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["timeline"])
    before = set(sys.modules)
    loaded = {name: importlib.import_module(name) for name in ("timeline", "kernels", "steps")}
    loaded["table"] = importlib.import_module("tables.timeline")
    loaded["plot"] = importlib.import_module("tables.timeline_plot")
    yield SimpleNamespace(**loaded)
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.parent == FOLDER or name.partition(".")[0] == "tables":
            del sys.modules[name]


class World:
    """Three steps: a matrix product and a staged write in each layer, a commit, one draft."""

    def __init__(self, modules: SimpleNamespace, shift: float = 0.0) -> None:
        self.events: list[dict[str, Any]] = []
        self.ranges: list[Any] = []
        self._modules, self._shift = modules, shift
        for number in range(3):
            self._step(1000.0 * number)

    def _step(self, begin: float) -> None:
        self._mark("verify", begin, 500)
        for layer in range(LAYERS):
            self._kernel("nvjet_tst_64x8_TNT", begin + 100 * layer + 10)
            self._range("nwor.stage", begin + 100 * layer + 50)
            self._kernel(
                "void nwor::(anonymous namespace)::StageKernel<4>(X)", begin + 100 * layer + 54
            )
        self._mark("sample", begin + 520, 400)
        self._range("nwor.commit", begin + 540)
        self._kernel("void nwor::CommitKernel<2>(X)", begin + 545)
        self._mark("draft", begin + 600, 200)
        name = (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >(int)"
        )
        self._kernel(name, begin + 610)

    def _mark(self, part: str, begin: float, us: float) -> None:
        told = {"name": f"nwor_part {part}", "cat": "user_annotation", "ph": "X"}
        self.events.append(told | {"ts": begin, "dur": us})

    def _range(self, name: str, begin: float) -> None:
        begin += self._shift
        self.ranges.append(self._modules.timeline.Span(name, begin, begin + 20))

    def _kernel(self, name: str, launch: float) -> None:
        told = {"ph": "X", "args": {"correlation": len(self.events)}}
        self.events.append(told | {"name": name, "cat": "kernel", "ts": launch + LATE, "dur": 5.0})
        self.events.append(
            told | {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": launch, "dur": 2.0}
        )

    def timeline(self) -> dict[str, Any]:
        found = self._modules.timeline.timeline({"traceEvents": self.events}, self.ranges)
        told = {"device": "Made-up GPU", "vllm": "0", "torch": "2", "commit": "c", "layers": LAYERS}
        told |= {"model": "made-up", "batch": 2, "context": 64, "drafts": 4}
        return told | found


@pytest.mark.parametrize("shift", [0.0, 30.0, -40.0])
def test_kernels_belong_to_what_launched_them(modules: SimpleNamespace, shift: float) -> None:
    """Also where the clocks of ranges and kernels are apart."""
    found = World(modules, shift).timeline()
    assert found["step_us"] == STEP
    assert [name for name, _, _ in found["parts"]] == ["verify", "sample", "draft"]
    assert [name for name, _, _ in found["ranges"]] == ["nwor.stage"] * LAYERS + ["nwor.commit"]
    kernels = found["kernels"]
    assert [tuple(kernel[3:]) for kernel in kernels] == [
        *[("verify", ""), ("verify", "nwor.stage")] * LAYERS,
        ("sample", "nwor.commit"),
        ("draft", ""),
    ]
    names = [kernel[0] for kernel in kernels]
    assert names == [
        *["nvjet_tst_64x8_TNT", "StageKernel"] * LAYERS, "CommitKernel", "FillFunctor"
    ]  # fmt: skip
    assert kernels[0][1:3] == [10 + LATE, 5.0]


def test_clocks_that_have_nothing_in_common_are_refused(modules: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match="no range was opened while the profiler was on"):
        World(modules, shift=1e9).timeline()
    world = World(modules)
    inside = [world.ranges[0]] * 20  # a launch is in one place alone
    world.ranges = [
        type(one)(one.name, one.begin + 20 * place, one.begin + 20 * place + 0.1)
        for place, one in enumerate(inside)
    ]
    with pytest.raises(SystemExit, match="the clocks of ranges and kernels differ"):
        world.timeline()


def test_names_without_their_arguments(modules: SimpleNamespace) -> None:
    names = {
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<X> > >(Y)":
            "flash::FlashAttnFwdSm90",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &(X)>(Y)": "vllm::act_and_mul_kernel",
        "Memcpy HtoD (Pinned -> Device)": "Memcpy HtoD",
        "_prepare_inputs_kernel": "_prepare_inputs_kernel",
    }  # fmt: skip
    assert {name: modules.timeline.brief(name) for name in names} == names


def test_ranges_are_read_as_the_recorder_writes_them(
    modules: SimpleNamespace, tmp_path: Path
) -> None:
    log = tmp_path / "ranges"
    log.write_text(
        f"domain nwor_specpv {BASE_NS}\n"
        f"push NCCL some thing {BASE_NS + 1000}\n"
        f"push nwor_specpv nwor.commit {BASE_NS + 2000}\n"
        f"push nwor_specpv nwor.stage {BASE_NS + 3000}\n"
        f"pop nwor_specpv {BASE_NS + 4000}\n"
        f"pop NCCL {BASE_NS + 4500}\n"
        f"pop nwor_specpv {BASE_NS + 5000}\n"
    )
    span = modules.timeline.Span
    found = modules.timeline.read_ranges(log, BASE_NS)
    assert found == [span("nwor.commit", 2.0, 5.0), span("nwor.stage", 3.0, 4.0)]


def test_the_table_and_the_drawing(modules: SimpleNamespace) -> None:
    found = World(modules).timeline()
    lines = list(modules.table.result_lines(found))
    assert lines[-2:] == [
        f"| `nwor.stage` | {LAYERS} | 20.0 | {LAYERS} | 20.0 |",
        "| `nwor.commit` | 1 | 20.0 | 1 | 5.0 |",
    ]
    picture = ET.fromstring(modules.plot.render(found))
    tips = [tip.text for tip in picture.iter(f"{SVG}title")]
    assert sum(tip == "StageKernel: 5.0 us" for tip in tips) > LAYERS, "in a close-up, too"
    said = [text.text for text in picture.iter(f"{SVG}text")]
    assert "one layer on the GPU" in said
    assert any(text.endswith("CommitKernel: 5.0 us") for text in said)
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.get("class")]
    for box in boxes:
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= 760


def test_without_a_result_the_page_says_so(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(modules.table, "RESULTS", tmp_path)
    assert list(modules.table.timeline_lines()) == ["No timeline is recorded."]
    assert modules.table.plots(tmp_path) == {}
