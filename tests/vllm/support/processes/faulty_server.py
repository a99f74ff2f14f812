"""vLLM's OpenAI server whose worker has a fault: this file, then the server's own arguments.

NWOR_TEST_FAULT=block:FILE has a write in the middle of a staged round tell FILE where it is and
never come back. NWOR_TEST_FAULT=refuse has some commits refused as a GPU refuses them: the next
step is told. vLLM's processes import this file, which stays their main module, or are forked from
one that has.
"""

from __future__ import annotations

import json
import os
import runpy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nwor_specpv import COMMIT_ERRORS
from nwor_specpv.vllm import faults
from nwor_specpv.vllm.steps import Steps

EVERY = 10


def block(told: Path) -> None:
    """Once some drafts were committed."""
    original = Steps.write

    def write(self: Steps, layer: str, *args: Any, **how: Any) -> bool:
        found = original(self, layer, *args, **how)
        layers = list(self._staging.bound)
        if not self.stages or layer != layers[len(layers) // 2]:
            return found
        stats = self._step.interceptor.stats()
        if stats["committed_tokens"] > 0:
            place = {"written": self._step.num_writes, "layers": len(layers), "pid": os.getpid()}
            unfinished = told.with_suffix(".part")
            unfinished.write_text(json.dumps(place | {"round_open": stats["round_open"]}))
            unfinished.rename(told)
            while True:
                time.sleep(1)
        return found

    Steps.write = write


def refuse() -> None:
    """Every tenth commit of accepted drafts."""
    faults.PAUSE_SECONDS = 0.0
    commit, seen = Steps._commit, []

    def refusing(self: Steps, step: Any, counts: torch.Tensor) -> list[Any]:
        seen.extend([1] if counts.any() else [])
        if not counts.any() or len(seen) % EVERY != 3:
            return commit(self, step, counts)
        step.interceptor.abort()
        status = torch.zeros(8, dtype=torch.int64)
        status[0] = COMMIT_ERRORS.index("slot_range")
        return [SimpleNamespace(status=status)]

    Steps._commit = refusing
    Steps._learns_late = lambda *_: True


fault, _, path = os.environ["NWOR_TEST_FAULT"].partition(":")
if fault == "block":
    block(Path(path))
else:
    refuse()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
