"""Two data-parallel engines of a dense model on the CPU. vLLM gives each an engine that knows of no
other; what both share is the host. Trees are on model runner V2 (`triton_cpu.py`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nwor_specpv.vllm.specpv.rules import DRAFTER
from support.engine_process import run_script
from support.engines import NGRAM, STAGED, STOCK, drive, greedy, start, story_prompts
from support.server import free_port
from support.small_views import SMALL_VIEW

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "processes" / "data_parallel.py"
TOKENS, RANKS = 40, 2


def prompts() -> list[list[int]]:
    """Each rank has one that is longer than its view, and one that is shorter."""
    lengths = (200, 150, 40, 30)
    return [(p * 40)[:length] for p, length in zip(story_prompts(4), lengths, strict=True)]


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    story = drive(start(STOCK, speculation=None), prompts(), greedy(TOKENS))
    return [story.tokens[str(i)] for i in range(4)]


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "staging": (STAGED, NGRAM),
    "trees": (STAGED | {"draft_tree": 8}, {"num_speculative_tokens": 7}),
    "lossless": (
        STAGED | SMALL_VIEW | {"specpv_draft_passes": 3},
        {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_write_what_plain_vllm_writes(
    tmp_path: Path, plain_tokens: list[list[int]], kind: str
) -> None:
    """Each has requests of its own, and an endpoint of its own."""
    nwor, speculation = KINDS[kind]
    port = free_port()
    job = {
        "start": {
            "nwor": nwor | {"metrics_port": port},
            "speculation": speculation,
            "data_parallel_size": RANKS,
        },
        "prompts": prompts(),
        "max_tokens": TOKENS,
        "port": port,
    }
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if kind == "trees" else {}
    found, log = run_script(tmp_path, job, SCRIPT, VLLM_LOGGING_LEVEL="WARNING", **runner)
    print(log[-2000:])
    assert found["tokens"] == plain_tokens
    for metrics in found["metrics"]:
        counted = dict(re.findall(r"^(\w+)(?:\{rank=\"\d+\"\})? (\S+)$", metrics, re.M))
        staged, committed, rejected = (
            float(counted[f"nwor_{name}_tokens_total"])
            for name in ("staged", "committed", "rejected")
        )
        assert staged == committed + rejected > 0
        assert committed > 0
        assert float(counted["nwor_contract_violations_total"]) == 0
        if kind == "lossless":
            assert float(counted["specpv_draft_passes_total"]) > 0
