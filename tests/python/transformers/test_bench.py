"""The benchmarks of whole generations: what they count, and what they divide by."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


@pytest.fixture
def generate_gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_gpu", BENCHMARKS / "generate_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
