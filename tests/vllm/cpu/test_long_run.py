"""Ten thousand steps of the real engine under the contract checker: traffic at random."""

from __future__ import annotations

import os
import random

import pytest

from support.engines import STAGED, greedy, own_engine, start, story_prompts
from support.engines import stats as own_stats
from support.installed import PAGE

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))
STEPS = int(os.environ.get("NWOR_VLLM_STEPS", "10000"))


@pytest.mark.slow
def test_the_contract_holds_for_ten_thousand_steps() -> None:
    """Requests come and go, some are aborted, some are preempted; blocks are reused many times."""
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    llm = start(
        STAGED, num_gpu_blocks_override=640 // PAGE, max_model_len=256, max_num_batched_tokens=64
    )
    engine, prompts = llm.llm_engine, story_prompts(6)
    alive: set[str] = set()
    for step in range(STEPS):
        if len(alive) < 8 and rng.random() < 0.2:
            name = str(step)
            prompt = rng.choice(prompts)[: rng.randint(1, 30)]
            engine.add_request(name, {"prompt_token_ids": prompt}, greedy(rng.randint(1, 120)))
            alive.add(name)
        if alive and rng.random() < 0.01:
            name = rng.choice(sorted(alive))
            engine.abort_request([name])
            alive.discard(name)
        alive -= {output.request_id for output in engine.step() if output.finished}
    stats = own_stats()
    assert stats["rounds"] > 0.9 * STEPS
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert stats["committed_tokens"] > 0
    assert stats["aborted_rounds"] == 0
    assert stats["fallbacks"] == {}
    assert own_engine().violations == []
