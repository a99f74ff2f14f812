"""Model runner V2 itself in the tests that are always run: one batch, few tokens.

The others are in `test_runner_v2.py`; its docstring says how the runner runs on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.engines import STOCK, drive, greedy, start
from support.runner_v2_jobs import WITHOUT_HEAD, check, job, run
from support.small_views import prompts

pytestmark = [pytest.mark.serves("lossless with a head", "V2"), pytest.mark.quick]

TOKENS = 10


def test_head_and_target_in_turns_write_what_plain_vllm_writes(tmp_path: Path) -> None:
    texts = prompts()[:2]  # one longer than its view, one shorter
    plain = drive(start(STOCK, speculation=None), texts, greedy(TOKENS)).tokens
    truth = [text + plain[str(i)] for i, text in enumerate(texts)]
    params = {"max_tokens": TOKENS}
    (found,) = run(tmp_path, job(truth=truth, params=params) | {"prompts": texts})
    check(found)
    assert found["tokens"] == [plain]


@pytest.mark.slow
def test_steps_are_timed_after_steps_of_prompts_alone(tmp_path: Path) -> None:
    """A prompt of several steps: what is scheduled next to them is plain steps, whose times the
    choice needs."""
    pieces = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    free = {"specpv_draft_passes": 0}
    more = {"params": {"max_tokens": TOKENS}, "speculation": WITHOUT_HEAD, "start": pieces}
    (found,) = run(tmp_path, job(free, **more) | {"prompts": prompts()[:1]})
    assert found["grown"]["specpv_plain_steps_total"] >= TOKENS - 2
    assert found["grown"]["specpv_plain_step_tokens_total"] >= TOKENS // 2
