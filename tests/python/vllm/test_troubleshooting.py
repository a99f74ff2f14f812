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
VLLM = "tests/vllm/cpu"
REFUSALS = f"{VLLM}/test_refusals.py"
RECOVERY = f"{VLLM}/test_recovery.py"
LEFT = "leaves a layer to vLLM: it has"
# What a line begins with, the tests that produce it, and what each of them asserts of log and
# counters.
LINES: dict[str, dict[str, tuple[str, ...]]] = {
    "`nwor_specpv is off: ...` at start": {
        f"{REFUSALS}::test_what_does_not_go_together_is_refused": ("nwor_specpv is off: ",),
    },
    "`nwor_specpv leaves a layer to vLLM: it has a quantised KV cache`": {
        "tests/vllm/cuda/test_staging.py::test_a_float8_cache_is_left_to_vllm_by_our_own_attention":
            (f"{LEFT} a quantised KV cache",),
        f"{REFUSALS}::test_a_layer_we_cannot_serve_is_vllms":
            (LEFT, "attention sinks", "ALiBi slopes", "a head size of"),
        f"{REFUSALS}::test_a_model_we_cannot_serve_is_vllms": (f"{LEFT} ALiBi slopes",),
        f"{VLLM}/test_flash_backend.py::test_windows_are_ours_and_full_layers_flash_attentions":
            (f"{LEFT} a head size",),
        f"{REFUSALS}::test_backends_that_vllm_makes_of_ours_have_its_own_layers":
            (f"{LEFT} metadata",),
    },
    "`... attends to the K/V of ..., whose drafts are staged`": {
        f"{REFUSALS}::test_nobody_reads_drafts_from_a_cache_of_ours": ("attends to the K/V of",),
        f"{REFUSALS}::test_attention_that_vllm_makes_of_ours_is_refused": ("from our attention",),
    },
    "`Selected backend CUSTOM is not valid`": {
        f"{REFUSALS}::test_vllm_refuses_our_backend_for_a_model_it_is_unfit_for":
            ("Selected backend", "is not valid"),
    },
    "`Backend CUSTOM must be registered before use`": {
        f"{VLLM}/test_faults.py::test_custom_without_the_plugin_is_refused_by_vllm":
            ("Backend CUSTOM must be registered before use",),
    },
    **{
        f"reason `{reason}`": {f"{HERE}::test_a_reason_is_counted_and_logged_once": (reason,)}
        for reason in (
            "capacity", "not_ready", "unsupported_layout", "slot_mismatch", "incomplete_staging"
        )
    },
    "reason `out_of_memory`": {
        "tests/python/vllm/test_staging_memory.py"
        "::test_steps_without_memory_for_staging_are_written_directly":
            ("bypass (out_of_memory)", '{"out_of_memory": 1}'),
    },
    "reason `rank_disagreement`": {
        f"{VLLM}/test_tensor_parallel.py::test_after_ranks_disagreed_requests_are_computed_again": (
            "bypass (rank_disagreement)", '"rank_disagreement": 3',
            '["nwor_commit_failures_total"]["rank_disagreement"] == 3',
        ),
    },
    "reason `commit_failure`": {
        f"{STEPS}::test_a_refused_chunk_is_the_last": ('"commit_failure": 1',),
        f"{RECOVERY}::test_a_failing_commit_degrades_and_the_engine_goes_on":
            ('"commit_failure"', "accepted rows are written one by one"),
    },
    "reason `commit_lost`": {
        f"{STEPS}::test_every_chunk_on_a_gpu_is_heard_of_in_the_next_step":
            ("bypass (commit_lost)", '"commit_lost": 1'),
        f"{VLLM}/test_broken_steps.py::test_faults_that_a_commit_finds":
            ('"commit_lost"', "failures(before", "nwor_recoveries_total"),
        "tests/vllm/cuda/test_recovery.py::test_slots_that_a_commit_refuses_on_v1":
            ('"commit_lost"', "failures(before", "a commit was refused with"),
    },
    "`tokens are decoded without drafts ...`": {
        "tests/python/vllm/test_faults.py::test_drafts_come_back_by_themselves":
            ("tokens are decoded without drafts for 60 s", "drafts are scheduled again"),
        "tests/python/vllm/test_faults.py::test_what_would_come_again_ends_drafts":
            ("tokens are decoded without drafts until the server",),
    },
    "`specpv_draft_failures_total` above 0": {
        f"{VLLM}/specpv/test_lossless.py::test_a_failing_pass_drafts_nothing_and_serving_goes_on":
            ("a partial pass failed", "draft_failures(before) == {\"error\":"),
        f"{VLLM}/specpv/test_lossless.py::test_without_memory_for_views_lookups_draft":
            ("views could not be made", "draft_failures(before) == {\"out_of_memory\": 1}"),
        f"{VLLM}/specpv/test_speculator_start.py::test_a_start_that_fails_leaves_the_head_alone":
            ("partial passes failed", '["specpv_draft_failures_total"]["start"] == before + 1'),
        f"{VLLM}/test_tensor_parallel.py::test_passes_that_fail_on_one_rank_while_they_are_timed":
            ('["specpv_draft_failures_total"] == {"start": 1}',),
    },
    "`nwor_contract_violations_total` above 0": {
        f"{RECOVERY}::test_after_a_broken_contract_the_engine_serves_on_without_drafts": (
            "the contract checker found", "the commit contract was broken",
            '"nwor_contract_violations_total"',
        ),
    },
}  # fmt: skip


def lines_of_the_table() -> dict[str, str]:
    """What one sees, and the whole line."""
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    table = page[page.index("## Troubleshooting") :]
    found = re.findall(r"^(\| (.+?) \| .*\|)$", table, re.MULTILINE)[1:]  # without its head
    return {seen: line for line, seen in found}


def asserted_by(test: str) -> str:
    """The text of what a test asserts: assertions, expected errors, and what these name."""
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    (function,) = [node for node in functions if node.name == name]
    raised = (n.items for n in ast.walk(function) if isinstance(n, ast.With))
    found = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
    found += [item for items in raised for item in items if "raises" in ast.unparse(item)]
    named = {n.id for node in found for n in ast.walk(node) if isinstance(n, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and named & {ast.unparse(one) for one in node.targets}:
            found.append(node)
    found += function.decorator_list if {arg.arg for arg in function.args.args} & named else []
    return "\n".join(ast.unparse(node).replace("'", '"') for node in found)


def test_every_line_has_its_test() -> None:
    lines = lines_of_the_table()
    assert len(lines) > 10
    for seen in lines:
        keys = [key for key in LINES if seen.startswith(key)]
        assert len(keys) == 1, f"which test produces {seen!r}? Name it in LINES"
    for key in LINES:
        assert any(seen.startswith(key) for seen in lines), f"{key!r} is in the table no more"


@pytest.mark.parametrize("key", LINES)
def test_the_tests_of_a_line_assert_it(key: str) -> None:
    for test, wanted in LINES[key].items():
        if test.startswith(HERE):
            assert set(wanted) <= set(PRODUCERS)
            continue
        asserted = asserted_by(test)
        for text in wanted:
            assert text in asserted, f"{test} does not assert {text!r}"


@pytest.mark.parametrize("key", LINES)
def test_lines_of_the_log_that_users_are_told_to_look_for_are_asserted(key: str) -> None:
    """Text in backquotes with spaces in it, unless it is a command or a setting."""
    (line,) = (line for seen, line in lines_of_the_table().items() if seen.startswith(key))
    quoted = re.findall(r"`([a-z][a-z]*(?: [a-z]+)+)`", line.partition(" | ")[2])
    told = [text for text in quoted if not text.startswith("nwor-specpv ")]
    asserted = "".join(asserted_by(test) for test in LINES[key] if not test.startswith(HERE))
    for text in told:
        assert text in asserted, f"no test of {key!r} asserts {text!r}"


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
