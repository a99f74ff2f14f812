"""The benchmarks of whole generations: what they count, and what they divide by."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nwor_specpv import NworError
from nwor_specpv.bench import generate
from nwor_specpv.bench.generate import compare, ours

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


class Paced:
    """A generator whose steps take a second and give two tokens; the prompt's pass gives one."""

    def __init__(self, most: int = 100) -> None:
        self._most = most

    def forget(self) -> None:
        pass

    def generate(self, prompt: list[int], count: int) -> SimpleNamespace:
        count = min(count, self._most)
        steps = (count - 1) / 2
        told = {"steps": steps, "new_tokens": count, "requests": 1, "drift": None}
        stats = SimpleNamespace(as_dict=lambda: told | {"decode_seconds": steps})
        return SimpleNamespace(token_ids=[7] * count, stats=stats)


def test_decoding_alone_does_not_count_the_token_of_the_prompts_pass() -> None:
    way = ours(Paced(), whole=False)
    found = compare({"way": way}, [[1], [2]], 9, 2, way)["way"]
    assert found["tokens_per_second"] == 2
    assert found["median_tokens_per_second"] == 2
    assert found["tokens_per_step"] == 2


def test_whole_generations_count_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))  # a second from one look to the next
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(clock))
    way = ours(Paced(), whole=True)
    assert compare({"way": way}, [[1]], 9, 1, way)["way"]["tokens_per_second"] == 9


def test_generations_that_end_with_their_first_token_have_no_rate_of_decoding() -> None:
    long, short = ours(Paced(), whole=False), ours(Paced(most=1), whole=False)
    with pytest.raises(NworError, match="short: got no step, expected"):
        compare({"long": long, "short": short}, [[1]], 9, 1, long)


def load_benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def generate_gpu() -> ModuleType:
    return load_benchmark("generate_gpu")


@pytest.fixture
def generate_offload(monkeypatch: pytest.MonkeyPatch, generate_gpu: ModuleType) -> ModuleType:
    monkeypatch.setitem(sys.modules, "generate_gpu", generate_gpu)  # as a script finds it
    return load_benchmark("generate_offload")


@pytest.mark.parametrize(
    ("kinds", "steps"),
    [
        ("FpppFpppF", 3),
        ("FpppFpppFp", 3),
        ("FpppFpppFpp", 3),
        ("ppFppppF", 4),
        ("FFF", 0),
        ("FpppF", 3),
        ("Fppp", None),
        ("ppp", None),
    ],
)
def test_partial_steps_are_counted_from_one_refresh_to_the_next(
    generate_gpu: ModuleType, kinds: str, steps: int | None
) -> None:
    names = {"F": "full_refresh", "p": "partial"}
    assert generate_gpu.partial_steps([names[kind] for kind in kinds]) == steps


OFFLOAD = ["--device", "cpu", "--models", "tiny", "--contexts", "600", "--batches", "2"]
OFFLOAD += ["--view-blocks", "8", "--steps", "10", "--rounds", "1"]


def test_a_cache_in_host_memory_is_measured_beside_one_on_the_device(
    generate_offload: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    arguments = [*OFFLOAD, "--budget", str(2 << 20), "--json", str(file)]
    assert generate_offload.main(arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {"device", "torch", "transformers", "revision", "version"} <= set(report)
    (result,) = report["models"]["tiny"]["results"]
    assert report["models"]["tiny"]["shapes"]["num_hidden_layers"] == 2
    assert "specpv_offload" in result["refused on the GPU"]
    assert result["refused on the GPU"] in printed
    assert result["runs whose tokens differ"] == 0
    (found,) = result["rounds"]
    for way in ("full", "refresh", "lossless"):
        gpu, host = found[way]["gpu"], found[way]["host"]
        assert host["gpu_bytes"]["cache"] == gpu["host_bytes"] == 0
        assert host["host_bytes"] == gpu["gpu_bytes"]["cache"] > 2 << 20
        assert sum(host["gpu_bytes"].values()) <= 2 << 20
        assert host["steps"] == gpu["steps"]
        named = {"full"} if way == "full" else {"full_refresh", "first_partial", "partial"}
        assert set(host["steps"]) == named
        assert set(host["ms"]) == named | (set() if way == "full" else {"mean of cycles"})


def test_a_side_that_chooses_other_tokens_fails_the_benchmark(
    generate_offload: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = generate_offload.run_side

    def lie(runner: Any, *given: Any) -> Any:
        result, chosen = run(runner, *given)
        return result, chosen[1:] if runner.offload else chosen

    monkeypatch.setattr(generate_offload, "run_side", lie)
    assert generate_offload.main([*OFFLOAD, "--budget", str(2 << 20)]) == 1


def test_a_budget_that_everything_fits_is_refused(generate_offload: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--budget: got 1073741824, expected less than K/V"):
        generate_offload.main([*OFFLOAD, "--budget", str(1 << 30)])


@pytest.mark.parametrize(
    ("kinds", "mean"), [("FppFppFppFppF", 1.0), ("FppFppFppFp", 1.0), ("FppFppFp", None)]
)
def test_means_are_of_whole_cycles_after_the_first_two(
    generate_offload: ModuleType, kinds: str, mean: float | None
) -> None:
    names = {"F": "full_refresh", "p": "partial"}
    times = [100.0 if i < 6 or i >= 12 else 1.0 for i in range(len(kinds))]
    assert generate_offload.mean_of_cycles([names[kind] for kind in kinds], times) == mean
