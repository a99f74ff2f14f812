"""The benchmarks run from end to end on small sizes; what they measure is not looked at."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from nwor_specpv import _stamp
from support.flash_double import FLASH_ATTN, flash_attention

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "vllm"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Imports one of them, its arguments on the command line."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def load(name: str, *arguments: object) -> ModuleType:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        if name in ("steps", "kernels"):  # both engines share caches, and nobody afterwards
            allocation = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
            for shared in {"_allocate_kv_cache", "allocate_kv_cache"} & vars(allocation).keys():
                monkeypatch.setattr(allocation, shared, getattr(allocation, shared))
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


SMALL = ("--model", "stories", "--method", "ngram")


@pytest.mark.slow
def test_steps(program: Callable[..., ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    size = ("--batch", 1, 3, "--context", 128, "--acceptance", 0.5, "--steps", 3, "--turns", 1)
    assert program("steps", *SMALL, *size, "--json", out).main() == 0
    found = json.loads(out.read_text())
    (run,) = found["runs"]
    assert [(cell["batch"], cell["acceptance"]) for cell in run["cells"]] == [(1, 0.5), (3, 0.5)]
    assert run["stats"]["fallbacks"] == {}
    assert run["arguments"]["compile"] == "default"


def test_steps_are_added_to_a_file(program: Callable[..., ModuleType], tmp_path: Path) -> None:
    """A run replaces that of the same drafts and compilation; of another commit it is refused."""
    out = tmp_path / "steps.json"
    module = program("steps", "--drafts", 4, "--add", "--json", out)
    args, origin = module.parse(), {"device": "none", "revision": "a"}
    assert module.other_runs(args, origin) == []
    runs = [{"arguments": {"drafts": n, "compile": c}} for n in (4, 7) for c in ("default", "off")]
    out.write_text(json.dumps(origin | {"runs": runs}))
    assert module.other_runs(args, origin) == runs[1:]
    assert module.other_runs(module.parse(["--json", str(out)]), origin) == []
    with pytest.raises(SystemExit, match="is of another revision"):
        module.other_runs(args, origin | {"revision": "b"})


@pytest.mark.slow
def test_offline(program: Callable[..., ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "offline.json"
    size = ("--batch", 2, "--context", 64, "--tokens", 8, "--runs", 1)
    assert program("offline", *SMALL, *size, "--json", out).main() == 0
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["ratio"] > 0


@pytest.mark.slow
def test_kernels(
    program: Callable[..., ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Operators of the CPU stand in for kernels: attention is vLLM's on one side, ours on one."""
    out = tmp_path / "kernels.json"
    module = program("kernels", *SMALL, "--cells", "2x128", "--steps", 2, "--json", out)
    monkeypatch.setattr(module, "KINDS", ("cpu_op",))
    assert module.main() == 0
    stock, nwor = json.loads(out.read_text())
    assert (stock["side"], nwor["side"]) == ("stock", "nwor")
    for side in (stock, nwor):
        assert 0 <= side["between_us"] < side["span_us"]
    theirs = "_C::cpu_attention_with_kv_cache"
    assert theirs in stock["kernels"]
    assert theirs not in nwor["kernels"]
    assert theirs in capfd.readouterr().out


TIMELINE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import kernels, timeline
kernels.KINDS = ("cpu_op",)
sys.exit(timeline.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not _stamp.read_stamp().cuda, reason="built without the CUDA toolkit: no NVTX")
def test_timeline(tmp_path: Path) -> None:
    """Operators of the CPU stand in for kernels. NVTX looks for a tool once in a process."""
    out = tmp_path / "timeline.json"
    arguments = [*SMALL, "--cell", "2x128", "--json", str(out)]
    command = [sys.executable, "-c", TIMELINE, str(FOLDER), *arguments]
    subprocess.run(command, check=True, timeout=900)
    found = json.loads(out.read_text())
    assert {"nwor.stage", "nwor.commit"} <= {name for name, _, _ in found["ranges"]}
    assert {"verify", "sample"} <= {name for name, _, _ in found["parts"]}
    assert {"verify", "sample"} <= {part for _, _, _, part, _ in found["kernels"]}
    for _, begin, us in found["ranges"]:
        assert 0 <= begin < begin + us <= found["step_us"]


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors meant for a GPU are made here; graphs run when they are captured."""
    for name in ("randn", "arange", "full"):
        make = getattr(torch, name)

        def made(*args: Any, make: Callable = make, **options: Any) -> torch.Tensor:
            return make(*args, **(options | {"device": "cpu"}))

        monkeypatch.setattr(torch, name, made)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 1)
    for name, value in {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda _: contextlib.nullcontext(),
        "Event": lambda **_: event,
        "synchronize": lambda: None,
        "get_device_name": lambda: "none",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


KINDS = ("stock", "staging")


@pytest.mark.slow
def test_prefix_reuse(program: Callable[..., ModuleType], tmp_path: Path) -> None:
    """Staging finds what stock vLLM finds with the same drafter, which may be less than plain."""
    out = tmp_path / "reuse.json"
    drafted = [f"{kind}, {drafter}" for drafter in ("n-grams", "EAGLE3") for kind in KINDS]
    size = ("--conversations", 2, "--turns", 3, "--answer-tokens", 40)
    assert program("prefix_reuse", "--sides", "plain", *drafted, *size, "--json", out).main() == 0
    found = {side["side"]: side for side in json.loads(out.read_text())["sides"]}
    plain = found["plain"]
    assert plain["found"] == plain["possible"] > 0
    for side in found.values():
        assert side["possible"] == plain["possible"]
        assert side["equal_answers"] == side["answers"] == 6
    for name in ("n-grams", "EAGLE3"):
        stock, staging = (found[f"{kind}, {name}"] for kind in KINDS)
        assert staging["found_by_turn"] == stock["found_by_turn"]
        assert 0 < staging["found"] <= plain["found"]


@pytest.mark.slow
def test_prefix_schedule(
    program: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its calls of FlashAttention, bound to vLLM's signatures."""
    out = tmp_path / "schedule.json"
    with flash_attention(FLASH_ATTN) as calls:
        sizes = ("--cells", "1x64", "3x96", "--times", 1, 2, "--replays", 1)
        module = program("prefix_schedule", *sizes, "--json", out)
        on_cpu(monkeypatch)
        assert module.main() == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(c["batch"], c["tokens"], c["rows"]) for c in cells] == [
        (1, 64, 5), (1, 64, 8), (3, 96, 5), (3, 96, 8)
    ]  # fmt: skip
    # As vLLM schedules it, as the plugin does, and by the numbers that were asked for.
    assert [plan["sm_margin"] for plan in calls.planned[:4]] == [0, 0, 0, -132]
    assert [plan["causal"] for plan in calls.planned[:4]] == [True, False, False, False]


def test_specpv_report(
    program: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table of long contexts can be made from it, and it says what was measured."""
    out = tmp_path / "specpv.json"
    names = ("1x4096", "8x32768", "24x32768", "6x122880")
    module = program("specpv", "--cells", *names, "--json", out)
    told = {"step_ms": 2.0, "tokens_per_s": 9.0, "passes": 3.0, "arms": {"3 passes": 96}}
    run = module.origin() | {"device": "none", "counts": {}, "cells": dict.fromkeys(names, told)}
    sides = ("stock", "refresh", "lossless")
    module.report(module.parse(), {side: [run] for side in sides})
    found = json.loads(out.read_text())
    assert found["commit"] == _stamp.read_stamp().revision
    assert found["torch"] == torch.__version__
    assert found["vllm"] == vllm.version.__version__
    monkeypatch.syspath_prepend(str(FOLDER.parents[1] / "tools"))
    table = importlib.import_module("tables.vllm")
    lines = list(table._head_lines(found))
    assert f"commit `{found['commit']}`" in lines[0]
    assert lines[0] == lines[0].strip()
    assert len(lines) == 2 + 2 + len(names)


def test_specpv_sides_that_have_run_are_kept(
    program: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a side that failed has left is not taken for a result."""
    out, kept, started = tmp_path / "specpv.json", tmp_path / "kept", []
    kept.mkdir()
    sides = ("--sides", "stock", "refresh", "--cells", "1x4096", "--keep", kept)
    module = program("specpv", *sides, "--json", out)
    told = {"step_ms": 2.0, "tokens_per_s": 9.0}
    broken = {"refresh"}

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        side = command[command.index("--child") + 1]
        started.append(side)
        run = {"counts": {}, "cells": {"1x4096": told}}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(run))
        return SimpleNamespace(returncode=int(side in broken))

    monkeypatch.setattr(module.subprocess, "run", run)
    assert module.main() == 1
    assert len(json.loads(out.read_text())["cells"]["1x4096"]["refresh"]) == 0
    broken.clear()
    assert module.main() == 0
    assert started == ["stock", "refresh", "refresh"]
    assert len(json.loads(out.read_text())["cells"]["1x4096"]["refresh"]) == 1


def test_specpv_report_before_a_side_has_run(
    program: Callable[..., ModuleType], tmp_path: Path
) -> None:
    out = tmp_path / "specpv.json"
    module = program("specpv", "--cells", "1x4096", "--json", out)
    module.report(module.parse(), {"stock": []})
    nothing = {"step_ms": {}, "ratio": {}, "speed": {}}
    assert json.loads(out.read_text())["cells"] == {"1x4096": {"stock": []} | nothing}


class Requests:
    """An engine whose requests get as many tokens in a step as the longest proposal has."""

    def __init__(self, tokens: int, most: int | None = None) -> None:
        self._tokens, self._most = tokens, most
        self._lens: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self._lens[name], self._ends[name] = 0, self._most or params.max_tokens

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for name in list(self._lens):
            self._lens[name] += self._tokens if self._lens[name] else 1
            length = self._lens[name]
            ended = length >= self._ends[name]
            if ended:
                del self._lens[name]
            made = [SimpleNamespace(token_ids=[0] * min(length, self._ends[name]))]
            outputs.append(SimpleNamespace(request_id=name, finished=ended, outputs=made))
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self._lens.clear()

    def has_unfinished_requests(self) -> bool:
        return bool(self._lens)


def test_specpv_requests_last_as_long_as_the_steps(
    program: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = program("specpv")
    seconds = SimpleNamespace(perf_counter=itertools.count().__next__, monotonic_ns=lambda: 0)
    monkeypatch.setattr(module, "time", seconds)
    graphs = SimpleNamespace(run_fullgraph=None)
    monkeypatch.setattr(
        module, "worker_runner", lambda _: SimpleNamespace(cudagraph_manager=graphs)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    longest = 1 + max(module.LONG_DRAFTS.values())

    def measure(steps: int, settle: int = 0, most: int | None = None) -> dict[str, Any]:
        engine = Requests(longest, most)
        core = SimpleNamespace(scheduler=None, batch_queue=None)
        engine.engine_core = SimpleNamespace(engine_core=core)
        return module.Bench(SimpleNamespace(llm_engine=engine), steps).measure(2, 128, settle)

    for steps, settle in ((1, 0), (48, 2), (200, 1)):
        assert measure(steps, settle)["tokens_per_s"] == 2 * steps * longest
    with pytest.raises(RuntimeError, match="has ended after 300 tokens"):
        measure(48, most=300)


def test_ncu_table(program: Callable[..., ModuleType], tmp_path: Path) -> None:
    """Kernels between two markers are a step; those before the first belong to none."""
    names = [
        "elementwise<at::native::abs>",
        "elementwise<at::native::erfinv_kernel_cuda>",
        "vllm::reshape_and_cache_flash_kernel<float>",
        "flash::MainloopStages<2>",
        "elementwise<at::native::erfinv_kernel_cuda>",
        "void nwor::MergeRowsKernel<8>",
        "void nwor::SmallCommitKernel<32>",
    ]
    columns = ("ID", "Kernel Name", "dram__bytes_read.sum", "dram__bytes_write.sum")
    columns += ("lts__t_sectors_op_write.sum",)
    rows = [columns, ("", "", "byte", "byte", "sector")]
    rows += [(str(n), name, "1,000", "10", "2") for n, name in enumerate(names)]
    kernels, output, result = (tmp_path / name for name in ("k.csv", "o.txt", "r.json"))
    text = "\n".join(",".join(f'"{value}"' for value in row) for row in rows)
    kernels.write_text("==PROF== Connected\n" + text + "\n")
    piece = {"batch": 8, "context": 64, "acceptance": 0.0}
    pieces = [{"side": side} | piece for side in ("stock", "nwor")]
    lines = ["told " + json.dumps({"device": "none"})]
    lines += ["piece " + json.dumps(piece) for piece in pieces]
    output.write_text("starts\n" + "\n".join(lines))
    assert program("ncu_table", kernels, output, result).main() == 0
    stock, nwor = json.loads(result.read_text())["pieces"]
    assert stock["l2_write_bytes"] == {"vLLM write": 64}
    assert nwor["l2_write_bytes"] == {"merge_rows": 64, "commit": 64}
    assert (stock["kernels"], nwor["kernels"]) == (2, 2)
    assert stock["dram_read_bytes"] == 2000
