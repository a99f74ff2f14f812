"""Mode `refresh` in the real vLLM on a GPU, in CUDA graphs: over views that hold everything
each layer's output is that of full attention, bit for bit.

Python does not run while a graph is replayed, so outputs are compared by operations that are
captured with it, and counted on the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv.models import smollm2
from support.book_texts import (
    BOOK_OPTIONS,
    BOOK_VIEW,
    COVERED,
    LENGTHS,
    LONGER,
    LONGER_LENGTHS,
    read,
    texts,
)
from support.engines import NGRAM, own_engine
from support.engines import stats as own_stats
from support.gpu_checks import watch_replays
from support.gpu_engines import (
    MODES,
    begin,
    both_modes,
    both_runners,
    check_runner,
    choose_runner,
    smollm2_head,
)
from support.small_views import cover_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Compared:
    """Compares what layers give over views with what full attention gives, in every step of an
    engine that is started afterwards. Rows of requests that see a view count, element by element.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> None:
        from nwor_specpv.vllm.specpv.refresh import RefreshStep

        # [run by Python, replayed] x [compared, other bits]. Of the same address in every graph.
        self._counts = torch.zeros(2, 2, dtype=torch.int64, device=device)
        after = RefreshStep.after

        def watched(step: Any, layer: str, attend: Any, query: Any, output: Any) -> None:
            self._add(step, output, attend(None))
            after(step, layer, attend, query, output)

        monkeypatch.setattr(RefreshStep, "after", watched)

    def _add(self, step: Any, output: torch.Tensor, whole: torch.Tensor) -> None:
        partial = step.views.store.num_blocks[: step.count] >= 0
        if step.row_requests is not None:
            rows = partial[step.row_requests]
        else:  # all requests have as many
            rows = partial[:, None].expand(-1, output.shape[0] // step.count).reshape(-1)
        one, other = (side[: rows.shape[0]].view(torch.int16) for side in (output, whole))
        differing = torch.ne(one, other).flatten(1).sum(1)
        # What is captured runs in replays alone.
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        counts = self._counts[int(captured)]
        counts[0].add_(rows.sum() * one[0].numel())
        counts[1].add_((differing * rows).sum())

    def take(self) -> list[list[int]]:
        """The counts since the last time."""
        found = self._counts.tolist()  # waits for the device
        self._counts.zero_()
        return found


@both_modes
@both_runners("refresh")
def test_views_of_everything_are_full_attention_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, mode: str
) -> None:
    """SmolLM2 over a book; V1 drafts by n-grams, V2 with the shipped head.

    Then texts that outgrow their views: the same graphs must count what is other.
    """
    choose_runner(monkeypatch, runner)
    compared, partial = Compared(monkeypatch), watch_replays(monkeypatch)
    speculation = smollm2_head(tmp_path) if runner == "v2" else NGRAM
    model = {"model": str(smollm2("bfloat16")), "speculation": speculation}
    llm = begin(BOOK_VIEW, **(model | BOOK_OPTIONS | MODES[mode]))
    compared.take()
    partial.clear()

    with monkeypatch.context() as patch:
        cover_all(patch, tokens=256)
        read(llm, texts(*COVERED), LENGTHS)
    eager, graphs = compared.take()
    layers = own_engine().own_layers
    impl = own_engine().layers[layers[0]].impl
    rows = 1 + speculation["num_speculative_tokens"]  # of each request in a graph
    told = sum(partial) * len(layers) * rows * impl.num_heads * impl.head_size
    print(f"{runner}, all in view: {graphs[1]} of {graphs[0]} elements differ in graphs, where "
          f"{told} are of partial steps; {eager[1]} of {eager[0]} elsewhere")  # fmt: skip
    check_runner(runner)
    assert 0 < graphs[0] <= told
    assert graphs[1] == eager[1] == 0

    read(llm, texts(*LONGER), LONGER_LENGTHS)
    _, graphs = compared.take()
    print(f"{runner}, longer: {graphs[1]} of {graphs[0]} elements differ in graphs")
    assert graphs[1] > 0
    assert own_stats()["fallbacks"] == {}
