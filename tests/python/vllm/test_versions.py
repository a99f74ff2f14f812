"""Which adapter serves which vLLM, and how sources of a release are compared with adapters."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nwor_specpv.vllm import versions
from nwor_specpv.vllm.versions.sources import expected

KNOWN = {known.version: known for known in versions.ADAPTERS}


@pytest.fixture(autouse=True)
def _chosen_again() -> Iterator[None]:
    before = versions.adapter, versions._served
    yield
    versions.adapter, versions._served = before


def write_release(folder: Path, adapter: versions.Adapter, **changed: tuple[str, ...]) -> Path:
    """A package `vllm` that has everything the adapter relies on. `changed`: other parameters,
    fields or names by the last part of a name."""
    files: dict[str, dict[str, list[str]]] = {"vllm": {}}
    for part in adapter.parts():
        *owner, name = part.path.split(".")
        names = changed.get(name, expected(part))
        owners = files.setdefault(part.module, {})
        if isinstance(part, versions.VllmFunction) or name.islower():
            made = f"def {name}({', '.join(names)}): ..."
            owners.setdefault(".".join(owner), []).append(made)
        else:  # a class, which may have methods that are named, too
            owners.setdefault(name, []).extend(f"{one}: int" for one in names)
    for module, owners in files.items():
        lines = []
        for owner, body in owners.items():
            lines += [f"class {owner}:", *(f"    {line}" for line in body)] if owner else body
        is_package = any(other.startswith(f"{module}.") for other in files)
        path = folder / module.replace(".", "/") / "__init__.py" if is_package else None
        path = path or folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("local", ["", "+cpu"])
@pytest.mark.parametrize("version", KNOWN)
def test_versions_that_were_read_have_an_adapter(version: str, local: str) -> None:
    assert versions.choose(version + local) == (None, None)
    assert versions.adapter is KNOWN[version]
    with pytest.raises(FrozenInstanceError):
        versions.adapter.version = "0"  # type: ignore[misc]


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.32.1", "1.0.0", "dev"])
def test_versions_that_fit_no_adapter_are_refused(version: str, tmp_path: Path) -> None:
    other = write_release(tmp_path, versions.ADAPTERS[0], prepare_inputs=("self", "other"))
    for site in (other, None):
        problem, warning = versions.choose(version, site)
        assert problem.startswith(f"vLLM {version} is not supported; run `pip install vllm==")
        assert "(vLLM 0.26.0, 0.32.0 or 0.33.0 works, each with its torch)" in problem
        assert warning is None


@pytest.mark.parametrize(
    ("version", "like"),
    [("0.26.1", "0.26.0"), ("0.32.1", "0.32.0"), ("0.34.0", "0.33.0"), ("0.31.0", "0.32.0")],
)
def test_a_version_that_fits_runs_with_one_warning(version: str, like: str, tmp_path: Path) -> None:
    site = write_release(tmp_path, KNOWN[like])
    problem, warning = versions.choose(version, site)
    assert problem is None
    assert warning is not None
    assert warning.startswith(f"vLLM {version} was not tested; it has the functions of vLLM {like}")
    assert versions.adapter is KNOWN[like]
    assert versions.choose(version, site) == (None, None)  # vLLM loads plugins more than once


def test_the_nearest_older_adapter_is_tried_first() -> None:
    def order(version: str) -> list[str]:
        return [known.version for known in versions.closest(version)]

    assert order("0.40.0") == ["0.33.0", "0.32.0", "0.26.0"]
    assert order("0.32.5") == ["0.32.0", "0.26.0", "0.33.0"]
    assert order("0.20.0") == ["0.26.0", "0.32.0", "0.33.0"]
    assert order("dev") == ["0.33.0", "0.32.0", "0.26.0"]


def pack(folder: Path, kind: str) -> Path:
    """The package as a wheel, an sdist or a folder."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    if kind == "wheel":
        packed = folder.parent / "vllm.whl"
        with zipfile.ZipFile(packed, "w") as archive:
            for name, path in files.items():
                archive.write(path, name)
        return packed
    if kind == "sdist":
        packed = folder.parent / "vllm.tar.gz"
        with tarfile.open(packed, "w:gz") as archive:
            for name, path in files.items():
                member = tarfile.TarInfo(f"vllm-0.99.0/{name}")
                member.size = path.stat().st_size
                archive.addfile(member, io.BytesIO(path.read_bytes()))
        return packed
    return folder


@pytest.mark.parametrize("kind", ["folder", "wheel", "sdist"])
@pytest.mark.parametrize("adapter", versions.ADAPTERS, ids=list(KNOWN))
def test_differences_name_file_and_line(
    kind: str, adapter: versions.Adapter, tmp_path: Path
) -> None:
    same = write_release(tmp_path / "same", adapter)
    assert versions.open_release(pack(same, kind)).differences(adapter) == []
    rows = adapter.uniform_rows_v2.path
    changed = {
        "flash_attn_varlen_func": ("more", *adapter.call_flash.names[1:]),
        "FlashAttentionImpl": ("more", *adapter.flash_layer.names[1:]),
        "add_requests": ("self", "scheduler_output", "extra"),
        "CommonAttentionMetadata": (*adapter.step_metadata.fields[1:], "novel"),
        "_init_candidates": ("other",),
    }
    other = write_release(tmp_path / "other", adapter, **changed)
    file = other / "vllm/v1/worker/gpu/model_runner.py"
    file.write_text(file.read_text().replace(f"def {rows}(", "def renamed("))
    found = [str(one) for one in versions.open_release(pack(other, kind)).differences(adapter)]
    lines = file.read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "def add_requests" in text)
    runner = "vllm/v1/worker/gpu/model_runner.py"
    assert f"{runner}:{line}: GPUModelRunner.add_requests has changed: new extra" in found
    assert any(one.startswith(f"{runner}:0: {rows} is not there, expected") for one in found)
    assert any("CommonAttentionMetadata has changed: without query_start_loc; new novel" in one
               for one in found)  # fmt: skip
    assert any("_init_candidates has changed: without self; new other" in one for one in found)
    # Of these, names that are not used do not matter.
    assert any(one.endswith("flash_attn_varlen_func has changed: without q") for one in found)
    assert any(one.endswith("FlashAttentionImpl has changed: without num_heads") for one in found)
    assert len(found) == 6


@pytest.mark.parametrize("module", ["vllm.v1.worker.utils", "..utils"])
def test_a_name_is_followed_to_where_it_is_defined(tmp_path: Path, module: str) -> None:
    adapter = versions.ADAPTERS[-1]
    site = write_release(tmp_path, adapter)
    runner = site / "vllm/v1/worker/gpu/model_runner.py"
    rows = adapter.uniform_rows_v2
    text = f"def {rows.path}({', '.join(rows.parameters)}): ..."
    runner.write_text(f"from {module} import {rows.path}\n" + runner.read_text().replace(text, ""))
    helpers = site / "vllm/v1/worker/utils.py"
    helpers.write_text(f"\n{text}\n")
    assert versions.open_release(site).differences(adapter) == []
    helpers.write_text(f"\ndef {rows.path}(num_reqs): ...\n")
    (found,) = versions.open_release(site).differences(adapter)
    assert str(found).startswith(f"vllm/v1/worker/utils.py:2: {rows.path} has changed: without ")


def test_what_is_no_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    for path in (tmp_path, tmp_path / "text", tmp_path / "nothing"):
        with pytest.raises(ValueError, match=r"holds no package vllm|is no folder, wheel or sdist"):
            versions.open_release(path)


# ---- what adapters do ----


def test_fields_of_requests_are_fields() -> None:
    for adapter in versions.ADAPTERS:
        fields = set(adapter.step_metadata.fields)
        assert fields >= {*adapter.of_requests, *adapter.of_rows}
        # Whatever is neither cut nor made anew must be the same for every part of a batch.
        whole = fields - {*adapter.of_requests, *adapter.of_rows}
        assert whole <= {
            *("query_start_loc", "query_start_loc_cpu", "num_reqs", "num_actual_tokens"),
            *("max_query_len", "max_seq_len", "causal", "mm_req_doc_ranges"),
            *("logits_indices_padded", "num_logits_indices", "max_logits_per_req"),
            *("_num_computed_tokens_cache", "_token_to_req_indices_cache"),
        }


@pytest.mark.parametrize("adapter", versions.ADAPTERS, ids=list(KNOWN))
def test_drawing_tells_what_was_drawn_from(adapter: versions.Adapter) -> None:
    """vLLM's sampler has to find the same distribution, whichever way it keeps logits."""
    torch.manual_seed(3)
    log_probs = torch.randn(6, 9).log_softmax(-1)
    owners = torch.tensor([0, 0, 1, 1, 2, -1])
    heat, seeds = torch.tensor([0.5, 1.7, 0.0]), torch.arange(3)
    kept, columns = torch.zeros(3, 2, 9), torch.tensor([0, 1, 0, 1, 0, 1])
    drawn = []

    def sample(logits, owners, temperature, seed, pos, **more):
        assert set(more) <= set(adapter.sample.parameters)
        own = temperature[owners.clamp(min=0)][:, None]
        hot = own > 0
        if more["apply_temperature"]:
            logits = torch.where(hot, logits / torch.where(hot, own, 1), logits)
        drawn.append(logits)
        return logits.argmax(-1)

    asked = {"use_fp64": False, "kept": kept, "columns": columns}
    found = adapter.draw(sample, log_probs, owners, heat, seeds, owners, **asked)
    torch.testing.assert_close(drawn[0], log_probs)
    assert found.equal(log_probs.argmax(-1))
    asked |= {"kept": None, "columns": None}
    adapter.draw(sample, log_probs, owners, heat, seeds, owners, **asked)
    torch.testing.assert_close(drawn[1], log_probs)


def test_the_plan_of_a_step_says_names_and_drafts() -> None:
    _, newer, newest = versions.ADAPTERS
    drafts = SimpleNamespace(tolist=lambda: [4, 0])
    for adapter in (newer, newest):
        state = SimpleNamespace(req_ids=["b", "a"], num_draft_tokens_np=drafts)
        assert adapter.names_of(None, None, state, None, 0) == ["b", "a"]
        assert adapter.scheduled_drafts(state, None, 0) == [4, 0]
        state.num_draft_tokens_np = None
        assert adapter.scheduled_drafts(state, None, 0) == [0, 0]
    plan = SimpleNamespace(num_spec_tokens_to_schedule=5, skip_drafts=True)
    assert [known.wanted_drafts(plan) for known in versions.ADAPTERS] == [5, 5, 0]
    plan.skip_drafts = False
    assert newest.wanted_drafts(plan) == 5


@pytest.mark.parametrize("adapter", versions.ADAPTERS, ids=list(KNOWN))
def test_a_window_is_where_the_version_looks_for_it(adapter: versions.Adapter) -> None:
    impl = SimpleNamespace(sliding_window=(-1, -1))
    metadata = SimpleNamespace(sliding_window=(-1, -1))
    seen = adapter.windowed(impl, metadata, (95, 0))
    places = {"metadata": seen.sliding_window, "layer": impl.sliding_window}
    assert metadata.sliding_window == (-1, -1), "others use it, too"
    on_metadata = adapter.version == "0.26.0"
    assert places["metadata" if on_metadata else "layer"] == (95, 0)
