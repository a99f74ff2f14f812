"""KV connectors on model runner V2 in a process of their own: connectors_v2.py JOB RESULTS.

job: `reference` (a file of torch.save) and `runs`: `prompts` or `answers` that vLLM's connector
saves, a moment at which ours does (`host_connector.py`), or `fault`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import conftest  # noqa: F401  (vLLM's environment)
from nwor_specpv.vllm import support
from support import triton_cpu
from support.engines import own_engine, release_engines
from support.engines import stats as own_stats
from support.heads import story_head
from support.installed import ADAPTER, PAGE


def main() -> None:
    triton_cpu.prepare()
    support.CONNECTORS |= {"support.host_connector.HostConnector"}
    job = json.loads(Path(sys.argv[1]).read_text())
    reference = torch.load(job["reference"], weights_only=False)
    with tempfile.TemporaryDirectory() as folder:
        head = story_head(Path(folder), torch.float32)
        found = [run(what, reference, head) for what in job["runs"]]
    Path(sys.argv[2]).write_text(json.dumps(found))


def run(what: str, reference: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    from support import connector_runs as runs  # these import vLLM
    from support.host_connector import host_connector
    from support.host_copies import offloading

    known = runs.Reference(**reference)
    # Two steps are planned before it is known what the first of them emits.
    late = 2 * runs.MOST_IN_A_STEP
    ours = what in ("layer", "forward", "next")
    answers = what == "answers" or (what == "fault" and not ADAPTER.offloads_last_token)
    connector = host_connector(what) if ours else offloading(offload_prompt_only=not answers)
    runs.forget_connector()
    llm = runs.begin(
        connector,
        nwor={} if what == "fault" else runs.STAGED,
        speculation=head | {"num_speculative_tokens": runs.MOST_IN_A_STEP - 1},
    )
    guess_from(llm, known.texts)
    if ours:
        runs.check_host(llm, known, late)
    elif what == "fault":
        runs.check_fault(llm, known)
    else:
        # vLLM keeps back the last block that a head has written.
        runs.check_offloading(llm, known, late + PAGE if what == "answers" else None)
    scheduler, stats = runs.scheduler_of(llm), own_stats()
    found = {
        "runner": type(own_engine().runner).__module__,
        "scheduler": type(scheduler).__name__,
        "accepted": stats["committed_tokens"] / stats["staged_tokens"],
    }
    del llm, scheduler
    release_engines()
    return found


def guess_from(llm: Any, texts: list[list[int]]) -> None:
    """The head's guesses are the texts' own tokens, three of four times."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    propose, states = runner.speculator.propose, runner.req_states

    def proposing(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = propose(batch, *args, **kwargs)
        for row, name in enumerate(batch.req_ids):
            index = states.req_id_to_index[name]
            length = int(states.total_len.gpu[index])
            said = states.all_token_ids.gpu[index, :length].tolist()
            # Steps go on beyond a text that has ended, and after a fault it may be another.
            text = next((text for text in texts if text[:length] == said[: len(text)]), [])
            for column, token in enumerate(text[length : length + drafts.shape[1]]):
                if (length + column) % 4:
                    drafts[row, column] = token
        return drafts

    runner.speculator.propose = proposing


if __name__ == "__main__":
    main()
