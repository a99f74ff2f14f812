"""KV connectors beside staging on model runner V2, with asynchronous scheduling and a head.

The checks are those of `test_connectors.py`; `triton_cpu.py` says how the runner runs on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.connector_runs import Reference, reference
from support.engine_process import run_script
from support.engines import story_prompts
from support.installed import ADAPTER, PAGE

pytestmark = pytest.mark.serves("KV connectors", "V2")

SCRIPT = Path(__file__).parents[1] / "support" / "processes" / "connectors_v2.py"
# In this version the plugin refuses a connector that saves answers.
ANSWERS = () if ADAPTER.offloads_last_token else ("answers",)


@pytest.fixture(scope="module")
def known() -> Reference:
    """Answers end a block after a few tokens, and are long enough for the next one."""
    lengths = (3 * PAGE - 3, 5 * PAGE - 3, PAGE - 3)
    texts = [(p * 40)[:n] for p, n in zip(story_prompts(3), lengths, strict=True)]
    return reference(texts, PAGE + 14)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param((*ANSWERS, "layer"), id="early"),
        pytest.param(("prompts", "forward", "next", "fault"), marks=pytest.mark.slow, id="late"),
    ],
)
def test_known_tokens_are_saved(tmp_path: Path, known: Reference, runs: tuple[str, ...]) -> None:
    path = tmp_path / "reference.pt"
    torch.save(vars(known), path)
    results, log = run_script(tmp_path, {"reference": str(path), "runs": runs}, SCRIPT)
    print(log[-2000:])
    assert len(results) == len(runs)
    for what, found in zip(runs, results, strict=True):
        assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
        assert found["scheduler"] == "AsyncScheduler"
        assert what == "fault" or 0.4 < found["accepted"] < 0.8
