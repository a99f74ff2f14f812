"""What `enable_specpv` sets where the user has said nothing: the pure part, without vLLM."""

from __future__ import annotations

import pytest

from nwor_specpv.vllm import defaults
from nwor_specpv.vllm.specpv.rules import DRAFTER, LONG_CONTEXT_SCHEDULER, SCHEDULERS

HEAD = {"method": "eagle3", "model": "head"}


@pytest.mark.parametrize(
    ("mode", "said", "on_gpu", "on_cpu"),
    [
        ("lossless", {}, defaults.SELF_DRAFT, defaults.SELF_DRAFT_ON_CPU),
        (
            "lossless",
            {"num_speculative_tokens": 8},
            {"method": "ngram_gpu"},
            {"method": "custom_class", "model": DRAFTER},
        ),
        ("lossless", HEAD, {"num_speculative_tokens": 15}, {"num_speculative_tokens": 15}),
        ("lossless", HEAD | {"num_speculative_tokens": 7}, {}, {}),
        (
            "lossless",
            {"method": "ngram_gpu"},
            {"num_speculative_tokens": 16},
            {"num_speculative_tokens": 16},
        ),
        (
            "lossless",
            {"model": DRAFTER},
            {"num_speculative_tokens": 16},
            {"num_speculative_tokens": 16},
        ),
        ("lossless", {"method": "ngram"}, {}, {}),
        ("lossless", {"model": "a/draft-model"}, {}, {}),
        ("refresh", {}, defaults.LOOKUPS, defaults.LOOKUPS),
        ("refresh", HEAD, {}, {}),
    ],
)
def test_speculation(mode: str, said: dict, on_gpu: dict, on_cpu: dict) -> None:
    assert defaults.speculation(mode, said, on_cpu=False) == on_gpu
    assert defaults.speculation(mode, said, on_cpu=True) == on_cpu
    assert not (on_gpu | on_cpu).keys() & said.keys()


@pytest.mark.parametrize(
    ("mode", "drafter", "runner_v2", "asynchronous", "caching", "named"),
    [
        ("lossless", "ngram_gpu", True, True, True, LONG_CONTEXT_SCHEDULER),
        ("lossless", "eagle3", True, False, False, LONG_CONTEXT_SCHEDULER),
        ("lossless", "eagle3", False, True, True, None),
        ("lossless", "custom_class", False, False, True, None),
        ("lossless", "mtp", True, True, True, None),
        ("refresh", "eagle3", True, True, True, SCHEDULERS[True]),
        ("refresh", "ngram", False, False, True, SCHEDULERS[False]),
        ("refresh", "ngram", False, False, False, None),
    ],
)
def test_scheduler(
    mode: str,
    drafter: str,
    runner_v2: bool,
    asynchronous: bool,
    caching: bool,
    named: str | None,
) -> None:
    found = defaults.scheduler(
        mode, drafter, runner_v2=runner_v2, asynchronous=asynchronous, prefix_caching=caching
    )
    assert found == named


@pytest.mark.parametrize(
    ("max_num_seqs", "rows", "largest", "max_tokens", "last"),
    [
        (96, 17, 512, 8192, 96 * 17),
        (31, 17, 512, 8192, 31 * 17),
        (1024, 17, 512, 16384, 120 * 17),  # 2048 rows at most
        (1024, 16, 512, 16384, 2048),
        (96, 17, 512, 1000, 58 * 17),  # no step has more tokens
    ],
)
def test_graphs_reach_a_full_batch(
    max_num_seqs: int, rows: int, largest: int, max_tokens: int, last: int
) -> None:
    found = defaults.graph_rows(max_num_seqs, rows, largest, max_tokens)
    assert found[-1] == last
    assert len(found) <= 13
    assert all(size % rows == 0 for size in found)
    before = largest // rows
    for size in found:
        assert before < size // rows <= before + max(1, before // 8)
        before = size // rows


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens"), [(30, 8192), (1, 8192), (96, 512), (96, 256)]
)
def test_vllms_own_graphs_are_enough(max_num_seqs: int, max_tokens: int) -> None:
    assert defaults.graph_rows(max_num_seqs, 17, 512, max_tokens) == []


def test_the_line_names_everything() -> None:
    said = defaults.line("enable_specpv", ["scheduler class a.B", "CUDA graphs up to 1632 rows"])
    assert "enable_specpv" in said
    assert "scheduler class a.B; CUDA graphs up to 1632 rows" in said
