"""Each line of the troubleshooting table in docs/vllm.md was produced by a test, some here."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv.vllm.faults import Faults
from nwor_specpv.vllm.settings import read_settings
from nwor_specpv.vllm.staging import Staging
from nwor_specpv.vllm.steps import Steps

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests/python/vllm/test_troubleshooting.py"
STEPS = "tests/python/vllm/test_steps.py"
REFUSALS = "tests/vllm/cpu/test_refusals.py"
# What a line begins with, the test that produces it, and what that test finds in log or counters.
LINES: dict[str, list[tuple[str, str, str]]] = {
    "`nwor_specpv is off: ...` at start": [
        (REFUSALS, "test_what_does_not_go_together_is_refused", "nwor_specpv is off: "),
    ],
    "`nwor_specpv leaves a layer to vLLM: it has a quantised KV cache`": [
        (
            "tests/vllm/cuda/test_staging.py",
            "test_a_float8_cache_is_left_to_vllm_by_our_own_attention",
            "leaves a layer to vLLM: it has a quantised KV cache",
        ),
        (
            "tests/vllm/cpu/test_flash_backend.py",
            "test_windows_are_ours_and_full_layers_flash_attentions",
            "leaves a layer to vLLM: it has a head size",
        ),
        (REFUSALS, "test_backends_that_vllm_makes_of_ours_have_its_own_layers", "it has metadata"),
    ],
    "`... attends to the K/V of ..., whose drafts are staged`": [
        (REFUSALS, "test_nobody_reads_drafts_from_a_cache_of_ours", "attends to the K/V of"),
        (REFUSALS, "test_attention_that_vllm_makes_of_ours_is_refused", "from our attention"),
    ],
    "`Selected backend CUSTOM is not valid`": [
        (REFUSALS, "test_vllm_refuses_our_backend_for_a_model_it_is_unfit_for", "is not valid"),
    ],
    "`Backend CUSTOM must be registered before use`": [
        (
            "tests/vllm/cpu/test_faults.py",
            "test_custom_without_the_plugin_is_refused_by_vllm",
            "Backend CUSTOM must be registered before use",
        ),
    ],
    **{
        f"reason `{reason}`": [(HERE, "test_a_reason_is_counted_and_logged_once", reason)]
        for reason in (
            "capacity", "not_ready", "unsupported_layout", "slot_mismatch", "incomplete_staging"
        )
    },
    "reason `rank_disagreement`": [
        ("tests/python/kv_interceptor/test_agreement.py", "", "rank_disagreement"),
        (STEPS, "test_a_rank_writes_nothing_on_its_own", "rank_disagreement"),
    ],
    "reason `commit_failure`": [
        (STEPS, "test_a_refused_chunk_is_the_last", "commit_failure"),
        (
            "tests/vllm/cpu/test_recovery.py",
            "test_a_failing_commit_degrades_and_the_engine_goes_on",
            "commit_failure",
        ),
    ],
    "reason `commit_lost`": [
        (STEPS, "test_every_chunk_on_a_gpu_is_heard_of_in_the_next_step", "commit_lost"),
    ],
    "`tokens are decoded without drafts ...`": [
        (
            "tests/python/vllm/test_faults.py",
            "test_drafts_come_back_by_themselves",
            "tokens are decoded without drafts",
        ),
    ],
    "`specpv_draft_failures_total` above 0": [
        ("tests/vllm/cpu/test_rank_agreement.py", "", "specpv_draft_failures_total"),
        ("tests/python/deploy/test_alerts.py", "fail_to_draft", "DraftFailures"),
    ],
    "`nwor_contract_violations_total` above 0": [
        (
            "tests/vllm/cpu/test_recovery.py",
            "test_after_a_broken_contract_the_engine_serves_on_without_drafts",
            "the commit contract was broken",
        ),
        ("tests/python/deploy/test_alerts.py", "break_the_contract", "verify_staged"),
    ],
}  # fmt: skip


def lines_of_the_table() -> list[str]:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    table = page[page.index("## Troubleshooting") :]
    return re.findall(r"^\| (.+?) \| .*\|$", table, re.MULTILINE)[1:]  # without its head


def source_of(path: str, name: str) -> str:
    """A function's text; the file's without a name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not name:
        return text
    found = [
        ast.get_source_segment(text, node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1, f"{path} has {len(found)} functions {name}"
    return found[0]


def test_every_line_has_its_test() -> None:
    lines = lines_of_the_table()
    assert len(lines) > 10
    for line in lines:
        keys = [key for key in LINES if line.startswith(key)]
        assert len(keys) == 1, f"which test produces {line!r}? Name it in LINES"
    for key in LINES:
        assert any(line.startswith(key) for line in lines), f"{key!r} is in the table no more"


@pytest.mark.parametrize("key", LINES)
def test_the_test_of_a_line_looks_for_it(key: str) -> None:
    for path, name, found in LINES[key]:
        own = path == HERE
        assert own or found in source_of(path, name), f"{path}::{name} does not look for {found!r}"
        assert not own or found in PRODUCERS


# ---- reasons that no engine of today's runs into -------------------------------------------------

PAGES, SIZE, HEADS, DIM = 4, 16, 2, 64
SLOTS = torch.tensor([3, 4, 5, 6, 7])  # of a root and four drafts


class World:
    """The plugin's steps over layers "a" and "b"."""

    def __init__(self, cache: torch.Tensor | None = None, **keys: Any) -> None:
        self.caches = {name: torch.zeros(PAGES, HEADS, SIZE, 2 * DIM) for name in "ab"}
        if cache is not None:
            self.caches["b"] = cache
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32),
            parallel_config=None,
            kv_transfer_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=0),
        )
        held = {name: SimpleNamespace(kv_cache=cache) for name, cache in self.caches.items()}
        self.faults = Faults(recovers=True)
        self.staging = Staging(
            held, read_settings({"nwor_specpv": keys}, {}), config, 4, self.faults
        )
        self.staging.groups = [list(held)]
        self.steps = Steps(self.staging, self.faults)

    def step(self, layers: str = "ab", other: torch.Tensor = SLOTS) -> None:
        """A step that accepts two of four drafts. Layer "b" is given the slots `other`."""
        self.steps.begin(0, [5], [4], SLOTS)
        for name in layers:
            key, value = torch.ones(2, 5, HEADS, DIM)
            self.steps.write(name, key, value, other if name == "b" else SLOTS)
        self.steps.finish(lambda drafts: torch.full_like(drafts, 2))


PRODUCERS: dict[str, Callable[[], tuple[World, Callable[[World], None]]]] = {
    "capacity": lambda: (World(max_staging_bytes=1), World.step),
    "not_ready": lambda: (World(torch.empty(0, HEADS, SIZE, 2 * DIM)), World.step),
    "unsupported_layout": lambda: (
        World(torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=torch.int8)), World.step
    ),
    "slot_mismatch": lambda: (World(), lambda world: world.step(other=SLOTS + SIZE)),
    "incomplete_staging": lambda: (World(), lambda world: world.step("a")),
}  # fmt: skip


@pytest.mark.parametrize("reason", PRODUCERS)
def test_a_reason_is_counted_and_logged_once(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    world, step = PRODUCERS[reason]()
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        step(world)
        step(world)
    assert world.staging.interceptor is not None
    stats = world.staging.interceptor.stats()
    assert stats["fallbacks"][reason] >= 2
    assert caplog.text.count(f"nwor_specpv bypass ({reason})") == 1
    assert not stats["round_open"]
    lasting = reason in ("slot_mismatch", "incomplete_staging")
    assert world.faults.drafts_are_off == lasting
    assert ("until the server is restarted" in caplog.text) == lasting
    assert "commit_lost" not in stats["fallbacks"]
